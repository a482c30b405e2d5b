// bfloat: implicit conversion to float only; made from float explicitly, rounded to nearest even; every operation rounds.
#pragma once
struct bfloat {
  uint16_t bits;
  bfloat() = default;
  template <class T, class = metal::enable_if_t<metal::is_arithmetic_v<T>>>
  constexpr explicit bfloat(T value) : bits(round(float(value))) {}
  constexpr operator float() const { return __builtin_bit_cast(float, uint32_t(bits) << 16); }
  static constexpr uint16_t round(float value) {
    uint32_t u = __builtin_bit_cast(uint32_t, value);
    if ((u & 0x7FFFFFFFu) > 0x7F800000u) return uint16_t((u >> 16) | 0x40);  // NaN stays NaN
    return uint16_t((u + 0x7FFFu + ((u >> 16) & 1)) >> 16);
  }
  static constexpr bfloat from_bits(uint16_t b) { bfloat x{}; x.bits = b; return x; }
};
namespace metal {
template <> constexpr bool is_floating_point_v<bfloat> = true;
template <> constexpr bool is_arithmetic_v<bfloat> = true;
template <> struct numeric_limits<bfloat> {
  static constexpr bool is_signed = true, is_integer = false, has_infinity = true;
  static constexpr int digits = 8;
  static constexpr bfloat max() { return bfloat::from_bits(0x7F7F); }
  static constexpr bfloat min() { return bfloat::from_bits(0x0080); }
  static constexpr bfloat lowest() { return bfloat::from_bits(0xFF7F); }
  static constexpr bfloat infinity() { return bfloat::from_bits(0x7F80); }
  static constexpr bfloat quiet_NaN() { return bfloat::from_bits(0x7FC0); }
  static constexpr bfloat epsilon() { return bfloat::from_bits(0x3C00); }
};
template <class T> constexpr bool emu_is_int_v = is_integral_v<T>;
}  // namespace metal
// bfloat with bfloat or an integer gives bfloat; with half or float it converts to float.
#define EMU_BF(op)                                                                                              \
  constexpr METAL_FUNC bfloat operator op(bfloat a, bfloat b) { return bfloat(float(a) op float(b)); }          \
  template <class T, class = metal::enable_if_t<metal::emu_is_int_v<T>>>                                        \
  constexpr METAL_FUNC bfloat operator op(bfloat a, T b) { return bfloat(float(a) op float(bfloat(b))); }       \
  template <class T, class = metal::enable_if_t<metal::emu_is_int_v<T>>>                                        \
  constexpr METAL_FUNC bfloat operator op(T a, bfloat b) { return bfloat(float(bfloat(a)) op float(b)); }       \
  constexpr METAL_FUNC float operator op(bfloat a, float b) { return float(a) op b; }                           \
  constexpr METAL_FUNC float operator op(float a, bfloat b) { return a op float(b); }                           \
  constexpr METAL_FUNC float operator op(bfloat a, _Float16 b) { return float(a) op float(b); }                 \
  constexpr METAL_FUNC float operator op(_Float16 a, bfloat b) { return float(a) op float(b); }                 \
  constexpr METAL_FUNC bfloat& operator op##=(bfloat& a, bfloat b) { return a = bfloat(float(a) op float(b)); } \
  template <class T, class = metal::enable_if_t<metal::is_arithmetic_v<T> && !metal::is_same_v<T, bfloat>>>     \
  constexpr METAL_FUNC bfloat& operator op##=(bfloat& a, T b) { return a = bfloat(float(a) op float(b)); }
EMU_BF(+) EMU_BF(-) EMU_BF(*) EMU_BF(/)
#undef EMU_BF
constexpr METAL_FUNC bfloat operator-(bfloat a) { return bfloat::from_bits(a.bits ^ 0x8000); }
constexpr METAL_FUNC bfloat operator+(bfloat a) { return a; }
#define EMU_BF(op)                                                                                             \
  constexpr METAL_FUNC bool operator op(bfloat a, bfloat b) { return float(a) op float(b); }                   \
  template <class T, class = metal::enable_if_t<metal::is_arithmetic_v<T> && !metal::is_same_v<T, bfloat>>>    \
  constexpr METAL_FUNC bool operator op(bfloat a, T b) { return float(a) op float(b); }                        \
  template <class T, class = metal::enable_if_t<metal::is_arithmetic_v<T> && !metal::is_same_v<T, bfloat>>>    \
  constexpr METAL_FUNC bool operator op(T a, bfloat b) { return float(a) op float(b); }
EMU_BF(<) EMU_BF(>) EMU_BF(<=) EMU_BF(>=) EMU_BF(==) EMU_BF(!=)
#undef EMU_BF
