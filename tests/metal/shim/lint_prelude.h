// Stands for prelude.h under clang.
#pragma once
#include "lint.h"
using bfloat16_t = bfloat;
using float16_t = half;
template <class T> struct complex_t { using value_type = T; T real, imag; };
using complex64_t = complex_t<float>;
#define __MLX_EMU_LINT__
template <typename U> struct Limits {
  static constexpr constant U max = metal::numeric_limits<U>::max();
  static constexpr constant U min = metal::numeric_limits<U>::lowest();
  static constexpr constant U finite_max = metal::numeric_limits<U>::max();
  static constexpr constant U finite_min = metal::numeric_limits<U>::lowest();
};
