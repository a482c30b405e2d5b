// vec<T, N>: aligned as in Metal (three elements take the room of four), component names, plain swizzles, element-wise operators.
#pragma once
namespace metal {
template <class T, int N> struct vec;
template <class T> constexpr int emu_width = 1;
template <class T, int N> constexpr int emu_width<vec<T, N>> = N;
template <class T> constexpr bool emu_is_vec = false;
template <class T, int N> constexpr bool emu_is_vec<vec<T, N>> = true;
template <class T> constexpr bool emu_scalar = is_arithmetic_v<T>;

template <class T> METAL_FUNC constexpr void emu_put(T* to, int& at) { (void)to; (void)at; }
template <class T, class A, class... R> METAL_FUNC constexpr void emu_put(T* to, int& at, const A& a, const R&... rest) {
  if constexpr (emu_is_vec<A>) {
    for (int i = 0; i < emu_width<A>; ++i) to[at++] = T(a[i]);
  } else {
    to[at++] = T(a);
  }
  emu_put(to, at, rest...);
}
#define EMU_VEC_BODY(N)                                                                                              \
  vec() = default;                                                                                                   \
  template <class A, class = enable_if_t<emu_scalar<A>>> constexpr vec(A a) { for (int i = 0; i < N; ++i) (*this)[i] = T(a); } \
  template <class U, class = enable_if_t<!is_same_v<U, T>>> constexpr explicit vec(const vec<U, N>& o) { for (int i = 0; i < N; ++i) (*this)[i] = T(o[i]); } \
  template <class A, class B, class... R, class = enable_if_t<emu_width<A> + emu_width<B> + (0 + ... + emu_width<R>) == N>> \
  constexpr vec(const A& a, const B& b, const R&... rest) { int at = 0; emu_put(&x, at, a, b, rest...); }           \
  constexpr METAL_FUNC T& operator[](int i) { return (&x)[i]; }                                                      \
  constexpr METAL_FUNC const T& operator[](int i) const { return (&x)[i]; }
template <class T> struct alignas(2 * sizeof(T)) vec<T, 2> {
  union { T x; T r; };
  union { T y; T g; };
  EMU_VEC_BODY(2)
};
template <class T> struct alignas(4 * sizeof(T)) vec<T, 3> {
  union { struct { T x, y, z; }; struct { T r, g, b; }; vec<T, 2> xy; };
  EMU_VEC_BODY(3)
};
template <class T> struct alignas(4 * sizeof(T)) vec<T, 4> {
  union { struct { T x, y, z, w; }; struct { T r, g, b, a; }; struct { vec<T, 2> xy, zw; }; vec<T, 3> xyz; };
  EMU_VEC_BODY(4)
};
#undef EMU_VEC_BODY
template <class T> struct packed3 {
  T x, y, z;
  packed3() = default;
  packed3(const vec<T, 3>& v) : x(v.x), y(v.y), z(v.z) {}
  packed3(T a, T b, T c) : x(a), y(b), z(c) {}
  operator vec<T, 3>() const { return vec<T, 3>(x, y, z); }
  T& operator[](int i) { return (&x)[i]; }
  const T& operator[](int i) const { return (&x)[i]; }
};
#define EMU_OP(op)                                                                                                     \
  template <class T, int N> METAL_FUNC constexpr vec<T, N> operator op(const vec<T, N>& a, const vec<T, N>& b) {       \
    vec<T, N> r{}; for (int i = 0; i < N; ++i) r[i] = T(a[i] op b[i]); return r; }                                     \
  template <class T, int N, class S, class = enable_if_t<emu_scalar<S>>>                                               \
  METAL_FUNC constexpr vec<T, N> operator op(const vec<T, N>& a, S b) { return a op vec<T, N>(b); }                    \
  template <class T, int N, class S, class = enable_if_t<emu_scalar<S>>>                                               \
  METAL_FUNC constexpr vec<T, N> operator op(S a, const vec<T, N>& b) { return vec<T, N>(a) op b; }                    \
  template <class T, int N, class B> METAL_FUNC constexpr vec<T, N>& operator op##=(vec<T, N>& a, const B& b) { return a = a op b; }
EMU_OP(+) EMU_OP(-) EMU_OP(*) EMU_OP(/) EMU_OP(%) EMU_OP(&) EMU_OP(|) EMU_OP(^) EMU_OP(<<) EMU_OP(>>)
#undef EMU_OP
#define EMU_OP(op)                                                                                                  \
  template <class T, int N> METAL_FUNC constexpr vec<bool, N> operator op(const vec<T, N>& a, const vec<T, N>& b) { \
    vec<bool, N> r{}; for (int i = 0; i < N; ++i) r[i] = a[i] op b[i]; return r; }                                  \
  template <class T, int N, class S, class = enable_if_t<emu_scalar<S>>>                                            \
  METAL_FUNC constexpr vec<bool, N> operator op(const vec<T, N>& a, S b) { return a op vec<T, N>(b); }
EMU_OP(<) EMU_OP(>) EMU_OP(<=) EMU_OP(>=) EMU_OP(==) EMU_OP(!=) EMU_OP(&&) EMU_OP(||)
#undef EMU_OP
template <class T, int N> METAL_FUNC constexpr vec<T, N> operator-(const vec<T, N>& a) { vec<T, N> r{}; for (int i = 0; i < N; ++i) r[i] = T(-a[i]); return r; }
template <class T, int N> METAL_FUNC constexpr vec<T, N> operator~(const vec<T, N>& a) { vec<T, N> r{}; for (int i = 0; i < N; ++i) r[i] = T(~a[i]); return r; }
template <class T, int N> METAL_FUNC constexpr vec<bool, N> operator!(const vec<T, N>& a) { vec<bool, N> r{}; for (int i = 0; i < N; ++i) r[i] = !a[i]; return r; }
template <int N> METAL_FUNC bool any(vec<bool, N> a) { bool r = false; for (int i = 0; i < N; ++i) r |= a[i]; return r; }
template <int N> METAL_FUNC bool all(vec<bool, N> a) { bool r = true; for (int i = 0; i < N; ++i) r &= a[i]; return r; }
template <class T, int N> METAL_FUNC T dot(const vec<T, N>& a, const vec<T, N>& b) { T r = T(a[0] * b[0]); for (int i = 1; i < N; ++i) r = T(r + a[i] * b[i]); return r; }
}  // namespace metal
#define EMU_VEC(name, T) using name##2 = metal::vec<T, 2>; using name##3 = metal::vec<T, 3>; using name##4 = metal::vec<T, 4>;
EMU_VEC(float, float) EMU_VEC(half, half) EMU_VEC(bfloat, bfloat) EMU_VEC(int, int) EMU_VEC(uint, uint) EMU_VEC(short, short)
EMU_VEC(ushort, ushort) EMU_VEC(char, char) EMU_VEC(uchar, uchar) EMU_VEC(long, long) EMU_VEC(ulong, ulong) EMU_VEC(bool, bool)
#undef EMU_VEC
using packed_float3 = metal::packed3<float>;
using packed_half3 = metal::packed3<half>;
