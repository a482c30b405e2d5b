// The Metal Shading Language for g++: types, address spaces that vanish, mathematics, simdgroup operations.
#pragma once
#include "abi.h"

#define __METAL_VERSION__ 310
#define __HAVE_BFLOAT__ 1
#define METAL_FUNC inline __attribute__((__always_inline__))
#define EMU_SITE int emu_line = __builtin_LINE()

using uchar = uint8_t;
using ushort = uint16_t;
using uint = uint32_t;
using ulong = uint64_t;
using half = _Float16;
using ptrdiff_t_ = ptrdiff_t;

#include "shim_traits.h"
#include "shim_bfloat.h"
#include "shim_vec.h"
#include "shim_math.h"
#include "shim_simd.h"
#include "shim_matrix.h"
#include "shim_atomic.h"

// Address spaces and function qualifiers mean nothing here; clang checks them (tests/metal/lint.py).
#define device
#define constant
#define threadgroup
#define thread
#define kernel
#define threadgroup_imageblock
#define ray_data
#define object_data

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define HUGE_VALF __builtin_huge_valf()
#define MAXFLOAT 3.402823466e+38f
#define FLT_MAX 3.402823466e+38f
#define FLT_MIN 1.175494351e-38f
#define FLT_EPSILON 1.192092896e-07f
#define HALF_MAX half(65504.0f)
#define M_PI_F 3.14159265358979323846f
#define M_PI_2_F 1.57079632679489661923f
#define M_1_PI_F 0.31830988618379067154f
#define M_2_PI_F 0.63661977236758134308f
#define M_E_F 2.71828182845904523536f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LOG10E_F 0.43429448190325182765f
#define M_LN2_F 0.69314718055994530942f
#define M_LN10_F 2.30258509299404568402f
#define M_SQRT2_F 1.41421356237309504880f
#ifndef INT_MAX
#define INT_MAX 2147483647
#define INT_MIN (-INT_MAX - 1)
#define UINT_MAX 4294967295u
#define SHRT_MAX 32767
#define USHRT_MAX 65535
#define CHAR_BIT 8
#endif

using namespace metal;
