// What clang sees instead of shim.h when it checks address spaces: real ones for device, constant and threadgroup; numbers and
// vectors of the compiler itself, because their values may live in every address space; declarations without bodies.
#pragma once
#include <stddef.h>
#include <stdint.h>
#define __METAL_VERSION__ 310
#define METAL_FUNC inline
#define device __attribute__((address_space(1)))
#define constant __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#define thread
#define kernel
using uchar = uint8_t; using ushort = uint16_t; using uint = uint32_t; using ulong = uint64_t;
using half = _Float16;
using bfloat = double;  // only its address space matters here; g++ has checked its arithmetic
#include "shim_traits.h"
namespace metal {
template <> constexpr bool is_floating_point_v<bfloat> = true;
template <> struct numeric_limits<bfloat> {
  static constexpr bfloat max() { return 0; }
  static constexpr bfloat min() { return 0; }
  static constexpr bfloat lowest() { return 0; }
  static constexpr bfloat infinity() { return 0; }
  static constexpr bfloat quiet_NaN() { return 0; }
  static constexpr bfloat epsilon() { return 0; }
};
template <class T, int N> using vec = T __attribute__((ext_vector_type(N)));
template <class T, int N> struct emu_maker { template <class... A> vec<T, N> operator()(const A&...) const; };
}  // namespace metal
#define as_type emu_as_type
template <class To, class From> To emu_as_type(const From&);
#define EMU_VEC(name, T) using name##2 = metal::vec<T, 2>; using name##3 = metal::vec<T, 3>; using name##4 = metal::vec<T, 4>;
EMU_VEC(float, float) EMU_VEC(half, half) EMU_VEC(bfloat, bfloat) EMU_VEC(int, int) EMU_VEC(uint, uint) EMU_VEC(short, short)
EMU_VEC(ushort, ushort) EMU_VEC(char, char) EMU_VEC(uchar, uchar) EMU_VEC(long, long) EMU_VEC(ulong, ulong)
struct packed_float3 { float x, y, z; };
#undef EMU_VEC
// float4(a, b, c, d) is a call; `float4 x` and `float4*` stay the type.
#define float2(...) metal::emu_maker<float, 2>()(__VA_ARGS__)
#define float3(...) metal::emu_maker<float, 3>()(__VA_ARGS__)
#define float4(...) metal::emu_maker<float, 4>()(__VA_ARGS__)
#define half2(...) metal::emu_maker<half, 2>()(__VA_ARGS__)
#define half3(...) metal::emu_maker<half, 3>()(__VA_ARGS__)
#define half4(...) metal::emu_maker<half, 4>()(__VA_ARGS__)
#define bfloat2(...) metal::emu_maker<bfloat, 2>()(__VA_ARGS__)
#define bfloat4(...) metal::emu_maker<bfloat, 4>()(__VA_ARGS__)
#define int2(...) metal::emu_maker<int, 2>()(__VA_ARGS__)
#define int3(...) metal::emu_maker<int, 3>()(__VA_ARGS__)
#define int4(...) metal::emu_maker<int, 4>()(__VA_ARGS__)
#define uint2(...) metal::emu_maker<uint, 2>()(__VA_ARGS__)
#define uint3(...) metal::emu_maker<uint, 3>()(__VA_ARGS__)
#define uint4(...) metal::emu_maker<uint, 4>()(__VA_ARGS__)
#define ulong2(...) metal::emu_maker<ulong, 2>()(__VA_ARGS__)

namespace metal {
template <class A, class B> struct emu_common { using type = decltype(true ? A() : B()); };
#define EMU_F1(name) template <class T> conditional_t<is_integral_v<T>, float, T> name(T);
#define EMU_F2(name) template <class A, class B> typename emu_common<A, B>::type name(A, B);
#define EMU_MATH                                                                                                                   \
  EMU_F1(exp) EMU_F1(exp2) EMU_F1(exp10) EMU_F1(log) EMU_F1(log2) EMU_F1(log10) EMU_F1(sqrt) EMU_F1(rsqrt) EMU_F1(sin) EMU_F1(cos)  \
  EMU_F1(tan) EMU_F1(asin) EMU_F1(acos) EMU_F1(atan) EMU_F1(sinh) EMU_F1(cosh) EMU_F1(tanh) EMU_F1(asinh) EMU_F1(acosh)             \
  EMU_F1(atanh) EMU_F1(fabs) EMU_F1(floor) EMU_F1(ceil) EMU_F1(trunc) EMU_F1(rint) EMU_F1(round) EMU_F1(fract)                      \
  EMU_F2(pow) EMU_F2(powr) EMU_F2(atan2) EMU_F2(fmod) EMU_F2(fmax) EMU_F2(fmin) EMU_F2(copysign) EMU_F2(divide) EMU_F2(fdim)
EMU_MATH
namespace fast { EMU_MATH }
namespace precise { EMU_MATH }
EMU_F2(max) EMU_F2(min) EMU_F2(mulhi) EMU_F2(rotate) EMU_F2(step)
template <class T> T abs(T);
template <class T> T saturate(T);
template <class T> T sign(T);
template <class T> T popcount(T);
template <class T> T clz(T);
template <class T> T ctz(T);
template <class T> bool isnan(T);
template <class T> bool isinf(T);
template <class T> bool isfinite(T);
template <class T> bool signbit(T);
template <class T> bool any(T);
template <class T> bool all(T);
template <class T> float dot(T, T);
template <class T> float length(T);
template <class T> T normalize(T);
template <class T> T fma(T, T, T);
template <class T> T mad(T, T, T);
template <class T> T mix(T, T, T);
template <class T> T ldexp(T, int);
template <class T, class B> T select(T, T, B);
template <class A, class B, class C> typename emu_common<typename emu_common<A, B>::type, C>::type clamp(A, B, C);
template <class A, class B, class C> typename emu_common<typename emu_common<A, B>::type, C>::type max3(A, B, C);
template <class A, class B, class C> typename emu_common<typename emu_common<A, B>::type, C>::type min3(A, B, C);

enum class mem_flags : uint32_t { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
mem_flags operator|(mem_flags, mem_flags);
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);
#define EMU_S(name) template <class T> T name(T);
#define EMU_N(name) template <class T> T name(T, ushort);
EMU_S(simd_sum) EMU_S(simd_product) EMU_S(simd_max) EMU_S(simd_min) EMU_S(simd_and) EMU_S(simd_or) EMU_S(simd_xor)
EMU_S(simd_prefix_inclusive_sum) EMU_S(simd_prefix_exclusive_sum) EMU_S(simd_prefix_inclusive_product)
EMU_S(simd_prefix_exclusive_product) EMU_S(simd_broadcast_first) EMU_S(quad_sum) EMU_S(quad_product) EMU_S(quad_max) EMU_S(quad_min)
EMU_N(simd_shuffle) EMU_N(simd_broadcast) EMU_N(simd_shuffle_xor) EMU_N(simd_shuffle_up) EMU_N(simd_shuffle_down)
EMU_N(simd_shuffle_rotate_up) EMU_N(simd_shuffle_rotate_down) EMU_N(quad_broadcast) EMU_N(quad_shuffle) EMU_N(quad_shuffle_xor)
EMU_N(quad_shuffle_up) EMU_N(quad_shuffle_down)
template <class T> T simd_shuffle_and_fill_up(T, T, ushort);
template <class T> T simd_shuffle_and_fill_down(T, T, ushort);
struct simd_vote { using vote_t = uint64_t; explicit operator vote_t() const; bool all() const; bool any() const; };
simd_vote simd_ballot(bool);
bool simd_all(bool);
bool simd_any(bool);
bool simd_is_first();

template <class T, int C = 8, int R = 8> struct simdgroup_matrix {
  simdgroup_matrix();
  explicit simdgroup_matrix(T);
  vec<T, 2>& thread_elements();
};
template <class T, int C, int R> simdgroup_matrix<T, C, R> make_filled_simdgroup_matrix(T);
#define EMU_SPACE(space)                                                                                                           \
  template <class T> void simdgroup_load(simdgroup_matrix<T>&, const space T*, ulong = 8, vec<ulong, 2> = vec<ulong, 2>{}, bool = false); \
  template <class T> void simdgroup_store(const simdgroup_matrix<T>&, space T*, ulong = 8, vec<ulong, 2> = vec<ulong, 2>{}, bool = false);
EMU_SPACE(device) EMU_SPACE(threadgroup)
#undef EMU_SPACE
template <class D, class A, class B, class C>
void simdgroup_multiply_accumulate(simdgroup_matrix<D>&, const simdgroup_matrix<A>&, const simdgroup_matrix<B>&, const simdgroup_matrix<C>&);
template <class D, class A, class B> void simdgroup_multiply(simdgroup_matrix<D>&, const simdgroup_matrix<A>&, const simdgroup_matrix<B>&);

enum memory_order { memory_order_relaxed };
template <class T> struct atomic { T emu_value; };
using atomic_int = atomic<int>; using atomic_uint = atomic<uint>; using atomic_bool = atomic<bool>; using atomic_float = atomic<float>;
#define EMU_FETCH(space, name) template <class T, class U> T name(volatile space atomic<T>*, U, memory_order);
#define EMU_SPACE(space)                                                                                                           \
  template <class T> T atomic_load_explicit(const volatile space atomic<T>*, memory_order);                                        \
  template <class T, class U> void atomic_store_explicit(volatile space atomic<T>*, U, memory_order);                              \
  EMU_FETCH(space, atomic_fetch_add_explicit) EMU_FETCH(space, atomic_fetch_sub_explicit) EMU_FETCH(space, atomic_fetch_and_explicit) \
  EMU_FETCH(space, atomic_fetch_or_explicit) EMU_FETCH(space, atomic_fetch_xor_explicit) EMU_FETCH(space, atomic_fetch_max_explicit) \
  EMU_FETCH(space, atomic_fetch_min_explicit) EMU_FETCH(space, atomic_exchange_explicit)                                           \
  template <class T, class U> bool atomic_compare_exchange_weak_explicit(volatile space atomic<T>*, T*, U, memory_order, memory_order);
EMU_SPACE(device) EMU_SPACE(threadgroup)
}  // namespace metal
using simdgroup_float8x8 = metal::simdgroup_matrix<float>;
using simdgroup_half8x8 = metal::simdgroup_matrix<half>;
using simdgroup_bfloat8x8 = metal::simdgroup_matrix<bfloat>;
half operator""h(long double);
bfloat operator""bf(long double);
#include "shim_constants.h"
using namespace metal;
