// Stands for the complex type of MLX, whose constructors are overloaded by address space only.
#pragma once
#include "shim.h"
template <typename T>
struct complex_t {
  using value_type = T;
  T real, imag;
  constexpr complex_t() : real(0), imag(0) {}
  constexpr complex_t(T a, T b) : real(a), imag(b) {}
  constexpr complex_t(T a) : real(a), imag(0) {}
};
using complex64_t = complex_t<float>;
