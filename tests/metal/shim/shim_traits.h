// The part of <metal_type_traits> and <metal_limits> that kernels use; nothing of std, which kernels must not name.
#pragma once
namespace metal {
template <class T, T v> struct integral_constant { static constexpr T value = v; using type = integral_constant; constexpr operator T() const { return v; } };
template <bool b> using bool_constant = integral_constant<bool, b>;
using true_type = bool_constant<true>;
using false_type = bool_constant<false>;
template <bool b, class T = void> struct enable_if {};
template <class T> struct enable_if<true, T> { using type = T; };
template <bool b, class T = void> using enable_if_t = typename enable_if<b, T>::type;
template <bool b, class T, class F> struct conditional { using type = T; };
template <class T, class F> struct conditional<false, T, F> { using type = F; };
template <bool b, class T, class F> using conditional_t = typename conditional<b, T, F>::type;
template <class A, class B> struct is_same : false_type {};
template <class A> struct is_same<A, A> : true_type {};
template <class A, class B> constexpr bool is_same_v = is_same<A, B>::value;
template <class T> struct remove_const { using type = T; };
template <class T> struct remove_const<const T> { using type = T; };
template <class T> struct remove_volatile { using type = T; };
template <class T> struct remove_volatile<volatile T> { using type = T; };
template <class T> using remove_cv_t = typename remove_volatile<typename remove_const<T>::type>::type;
template <class T> struct remove_cv { using type = remove_cv_t<T>; };
template <class T> struct remove_reference { using type = T; };
template <class T> struct remove_reference<T&> { using type = T; };
template <class T> struct remove_reference<T&&> { using type = T; };
template <class T> using remove_reference_t = typename remove_reference<T>::type;
template <class T> using decay_t = remove_cv_t<remove_reference_t<T>>;
template <class T> struct remove_pointer { using type = T; };
template <class T> struct remove_pointer<T*> { using type = T; };
template <class T> using remove_pointer_t = typename remove_pointer<T>::type;
template <class T> constexpr bool is_floating_point_v = false;
template <> constexpr bool is_floating_point_v<float> = true;
template <> constexpr bool is_floating_point_v<_Float16> = true;
template <class T> constexpr bool is_integral_v = false;
#define EMU_INT(T) template <> constexpr bool is_integral_v<T> = true;
EMU_INT(bool) EMU_INT(char) EMU_INT(signed char) EMU_INT(unsigned char) EMU_INT(short) EMU_INT(unsigned short) EMU_INT(int)
EMU_INT(unsigned int) EMU_INT(long) EMU_INT(unsigned long) EMU_INT(long long) EMU_INT(unsigned long long)
#undef EMU_INT
template <class T> constexpr bool is_arithmetic_v = is_floating_point_v<T> || is_integral_v<T>;
template <class T> struct is_floating_point : bool_constant<is_floating_point_v<T>> {};
template <class T> struct is_integral : bool_constant<is_integral_v<T>> {};
template <class T> struct is_arithmetic : bool_constant<is_arithmetic_v<T>> {};
template <class T> constexpr bool is_signed_v = is_arithmetic_v<T> && T(-1) < T(0);
template <class T> constexpr bool is_unsigned_v = is_integral_v<T> && !is_signed_v<T>;
template <class T> struct is_signed : bool_constant<is_signed_v<T>> {};
template <class T> struct is_unsigned : bool_constant<is_unsigned_v<T>> {};
template <class A, class B> constexpr bool is_convertible_v = __is_constructible(B, A);
template <class A, class B> struct is_convertible : bool_constant<is_convertible_v<A, B>> {};
template <class T> struct make_unsigned { using type = conditional_t<sizeof(T) == 1, uint8_t, conditional_t<sizeof(T) == 2, uint16_t, conditional_t<sizeof(T) == 4, uint32_t, uint64_t>>>; };
template <class T> using make_unsigned_t = typename make_unsigned<T>::type;
template <class T> T&& declval();

template <class T> struct numeric_limits {  // integers
  static constexpr bool is_signed = T(-1) < T(0), is_integer = true, has_infinity = false;
  static constexpr int digits = int(sizeof(T) * 8) - is_signed;
  static constexpr T max() { return T(make_unsigned_t<T>(~make_unsigned_t<T>(0)) >> is_signed); }
  static constexpr T min() { return is_signed ? T(-max() - 1) : T(0); }
  static constexpr T lowest() { return min(); }
};
template <> struct numeric_limits<bool> { static constexpr bool max() { return true; } static constexpr bool min() { return false; } };
template <> struct numeric_limits<float> {
  static constexpr bool is_signed = true, is_integer = false, has_infinity = true;
  static constexpr int digits = 24;
  static constexpr float max() { return 3.402823466e+38f; }
  static constexpr float min() { return 1.175494351e-38f; }
  static constexpr float lowest() { return -max(); }
  static constexpr float infinity() { return __builtin_inff(); }
  static constexpr float quiet_NaN() { return __builtin_nanf(""); }
  static constexpr float epsilon() { return 1.192092896e-07f; }
};
template <> struct numeric_limits<_Float16> {
  static constexpr bool is_signed = true, is_integer = false, has_infinity = true;
  static constexpr int digits = 11;
  static constexpr _Float16 max() { return _Float16(65504.0f); }
  static constexpr _Float16 min() { return _Float16(6.103515625e-05f); }
  static constexpr _Float16 lowest() { return -max(); }
  static constexpr _Float16 infinity() { return _Float16(__builtin_inff()); }
  static constexpr _Float16 quiet_NaN() { return _Float16(__builtin_nanf("")); }
  static constexpr _Float16 epsilon() { return _Float16(0.0009765625f); }
};
}  // namespace metal

template <class To, class From>
constexpr METAL_FUNC To as_type(const From& x) {
  static_assert(sizeof(To) == sizeof(From), "as_type between types of different size");
  return __builtin_bit_cast(To, x);
}
