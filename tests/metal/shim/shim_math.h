// <metal_math>, <metal_common>, <metal_integer>, <metal_relational>: by the host's libm. fast:: is as exact as precise::.
#pragma once
namespace metal {
// float, half (through float, rounded once) and bfloat (the same), and vectors element by element.
#define EMU_F1(name, call)                                                                                           \
  METAL_FUNC float name(float x) { return call; }                                                                    \
  METAL_FUNC half name(half h) { float x = float(h); return half(call); }                                            \
  METAL_FUNC bfloat name(bfloat h) { float x = float(h); return bfloat(call); }                                      \
  template <class T, class = enable_if_t<is_integral_v<T>>> METAL_FUNC float name(T i) { float x = float(i); return call; } \
  template <class T, int N> METAL_FUNC vec<T, N> name(const vec<T, N>& v) { vec<T, N> r{}; for (int i = 0; i < N; ++i) r[i] = name(v[i]); return r; }
#define EMU_F2(name, call)                                                                                           \
  METAL_FUNC float name(float x, float y) { return call; }                                                           \
  METAL_FUNC half name(half a, half b) { float x = float(a), y = float(b); return half(call); }                      \
  METAL_FUNC bfloat name(bfloat a, bfloat b) { float x = float(a), y = float(b); return bfloat(call); }              \
  METAL_FUNC float name(float x, bfloat b) { float y = float(b); return call; }                                      \
  METAL_FUNC float name(bfloat a, float y) { float x = float(a); return call; }                                      \
  template <class T, int N> METAL_FUNC vec<T, N> name(const vec<T, N>& v, const vec<T, N>& u) { vec<T, N> r{}; for (int i = 0; i < N; ++i) r[i] = name(v[i], u[i]); return r; }
#define EMU_MATH                                                                                                     \
  EMU_F1(exp, __builtin_expf(x)) EMU_F1(exp2, __builtin_exp2f(x)) EMU_F1(exp10, __builtin_powf(10.0f, x))            \
  EMU_F1(log, __builtin_logf(x)) EMU_F1(log2, __builtin_log2f(x)) EMU_F1(log10, __builtin_log10f(x))                 \
  EMU_F1(sqrt, __builtin_sqrtf(x)) EMU_F1(rsqrt, 1.0f / __builtin_sqrtf(x))                                          \
  EMU_F1(sin, __builtin_sinf(x)) EMU_F1(cos, __builtin_cosf(x)) EMU_F1(tan, __builtin_tanf(x))                       \
  EMU_F1(asin, __builtin_asinf(x)) EMU_F1(acos, __builtin_acosf(x)) EMU_F1(atan, __builtin_atanf(x))                 \
  EMU_F1(sinh, __builtin_sinhf(x)) EMU_F1(cosh, __builtin_coshf(x)) EMU_F1(tanh, __builtin_tanhf(x))                 \
  EMU_F1(asinh, __builtin_asinhf(x)) EMU_F1(acosh, __builtin_acoshf(x)) EMU_F1(atanh, __builtin_atanhf(x))           \
  EMU_F1(fabs, __builtin_fabsf(x)) EMU_F1(floor, __builtin_floorf(x)) EMU_F1(ceil, __builtin_ceilf(x))               \
  EMU_F1(trunc, __builtin_truncf(x)) EMU_F1(rint, __builtin_rintf(x)) EMU_F1(round, __builtin_roundf(x))             \
  EMU_F1(fract, __builtin_fminf(x - __builtin_floorf(x), 0x1.fffffep-1f))                                            \
  EMU_F2(pow, __builtin_powf(x, y)) EMU_F2(powr, __builtin_powf(x, y)) EMU_F2(atan2, __builtin_atan2f(x, y))         \
  EMU_F2(fmod, __builtin_fmodf(x, y)) EMU_F2(fmax, __builtin_fmaxf(x, y)) EMU_F2(fmin, __builtin_fminf(x, y))        \
  EMU_F2(copysign, __builtin_copysignf(x, y)) EMU_F2(divide, x / y) EMU_F2(fdim, __builtin_fdimf(x, y))
EMU_MATH
namespace fast { EMU_MATH }
namespace precise { EMU_MATH }
#undef EMU_MATH
#undef EMU_F1
#undef EMU_F2
METAL_FUNC float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
METAL_FUNC half fma(half a, half b, half c) { return half(__builtin_fmaf(float(a), float(b), float(c))); }
METAL_FUNC bfloat fma(bfloat a, bfloat b, bfloat c) { return bfloat(__builtin_fmaf(float(a), float(b), float(c))); }
template <class T, int N> METAL_FUNC vec<T, N> fma(const vec<T, N>& a, const vec<T, N>& b, const vec<T, N>& c) { vec<T, N> r{}; for (int i = 0; i < N; ++i) r[i] = fma(a[i], b[i], c[i]); return r; }
template <class T> METAL_FUNC T ldexp(T x, int e) { return T(__builtin_ldexpf(float(x), e)); }
template <class T> METAL_FUNC T mad(T a, T b, T c) { return T(a * b + c); }

// the common type of a scalar pair as Metal promotes it
template <class A, class B> struct emu_common { using type = decay_t<decltype(true ? declval<A>() : declval<B>())>; };
template <class A> struct emu_common<A, A> { using type = A; };
template <class B> struct emu_common<bfloat, B> { using type = conditional_t<is_integral_v<B>, bfloat, float>; };
template <class A> struct emu_common<A, bfloat> { using type = conditional_t<is_integral_v<A>, bfloat, float>; };
template <> struct emu_common<bfloat, bfloat> { using type = bfloat; };
template <class A, class B> using emu_common_t = typename emu_common<A, B>::type;
#define EMU_SCALARS class = enable_if_t<emu_scalar<A> && emu_scalar<B>>
template <class A, class B, EMU_SCALARS> METAL_FUNC constexpr emu_common_t<A, B> max(A a, B b) {
  using T = emu_common_t<A, B>;
  if constexpr (is_floating_point_v<T>) return T(__builtin_fmaxf(float(T(a)), float(T(b)))); else return T(a) < T(b) ? T(b) : T(a);
}
template <class A, class B, EMU_SCALARS> METAL_FUNC constexpr emu_common_t<A, B> min(A a, B b) {
  using T = emu_common_t<A, B>;
  if constexpr (is_floating_point_v<T>) return T(__builtin_fminf(float(T(a)), float(T(b)))); else return T(b) < T(a) ? T(b) : T(a);
}
#undef EMU_SCALARS
template <class T, int N> METAL_FUNC vec<T, N> max(const vec<T, N>& a, const vec<T, N>& b) { vec<T, N> r{}; for (int i = 0; i < N; ++i) r[i] = max(a[i], b[i]); return r; }
template <class T, int N> METAL_FUNC vec<T, N> min(const vec<T, N>& a, const vec<T, N>& b) { vec<T, N> r{}; for (int i = 0; i < N; ++i) r[i] = min(a[i], b[i]); return r; }
template <class A, class B, class C> METAL_FUNC auto max3(A a, B b, C c) { return max(max(a, b), c); }
template <class A, class B, class C> METAL_FUNC auto min3(A a, B b, C c) { return min(min(a, b), c); }
template <class A, class B, class C> METAL_FUNC constexpr auto clamp(A x, B low, C high) { return min(max(x, low), high); }
template <class T, class = enable_if_t<emu_scalar<T>>> METAL_FUNC constexpr T abs(T x) {
  if constexpr (is_same_v<T, bfloat>) return bfloat::from_bits(x.bits & 0x7FFF);
  else if constexpr (is_floating_point_v<T>) return T(__builtin_fabsf(float(x)));
  else return x < T(0) ? T(-x) : x;
}
template <class T, int N> METAL_FUNC vec<T, N> abs(const vec<T, N>& v) { vec<T, N> r{}; for (int i = 0; i < N; ++i) r[i] = abs(v[i]); return r; }
template <class T> METAL_FUNC T saturate(T x) { return T(clamp(float(x), 0.0f, 1.0f)); }
template <class T> METAL_FUNC T sign(T x) { return x > T(0) ? T(1) : x < T(0) ? T(-1) : T(0); }
template <class T> METAL_FUNC T mix(T a, T b, T t) { return T(a + (b - a) * t); }
template <class T> METAL_FUNC T step(T edge, T x) { return x < edge ? T(0) : T(1); }
template <class T, class = enable_if_t<emu_scalar<T>>> METAL_FUNC constexpr bool isnan(T x) { return __builtin_isnan(float(x)); }
template <class T, class = enable_if_t<emu_scalar<T>>> METAL_FUNC constexpr bool isinf(T x) { return __builtin_isinf(float(x)); }
template <class T, class = enable_if_t<emu_scalar<T>>> METAL_FUNC constexpr bool isfinite(T x) { return __builtin_isfinite(float(x)); }
template <class T, class = enable_if_t<emu_scalar<T>>> METAL_FUNC constexpr bool signbit(T x) { return __builtin_signbit(float(x)); }
template <class T, class = enable_if_t<emu_scalar<T>>> METAL_FUNC constexpr T select(T a, T b, bool c) { return c ? b : a; }
template <class T, int N> METAL_FUNC vec<T, N> select(const vec<T, N>& a, const vec<T, N>& b, const vec<bool, N>& c) { vec<T, N> r{}; for (int i = 0; i < N; ++i) r[i] = c[i] ? b[i] : a[i]; return r; }
template <class T> METAL_FUNC constexpr T popcount(T x) { return T(__builtin_popcountll(make_unsigned_t<T>(x))); }
template <class T> METAL_FUNC constexpr T clz(T x) { return x ? T(__builtin_clzll(make_unsigned_t<T>(x)) - (64 - int(sizeof(T)) * 8)) : T(sizeof(T) * 8); }
template <class T> METAL_FUNC constexpr T ctz(T x) { return x ? T(__builtin_ctzll(make_unsigned_t<T>(x))) : T(sizeof(T) * 8); }
template <class T> METAL_FUNC constexpr T mulhi(T a, T b) { static_assert(sizeof(T) == 4); return T((is_signed_v<T> ? uint64_t(int64_t(a) * int64_t(b)) : uint64_t(a) * uint64_t(b)) >> 32); }
template <class T> METAL_FUNC constexpr T rotate(T x, T n) { using U = make_unsigned_t<T>; const int w = int(sizeof(T)) * 8; int k = int(n) & (w - 1); return k ? T((U(x) << k) | (U(x) >> (w - k))) : x; }
template <int N> METAL_FUNC float length(const vec<float, N>& v) { return __builtin_sqrtf(dot(v, v)); }
template <int N> METAL_FUNC vec<float, N> normalize(const vec<float, N>& v) { return v * (1.0f / length(v)); }
}  // namespace metal
constexpr half operator""h(long double x) { return half(float(x)); }
constexpr bfloat operator""bf(long double x) { return bfloat(float(x)); }
