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

#include "shim_constants.h"

using namespace metal;
