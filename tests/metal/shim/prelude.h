// Everything a kernel sees before its own text; compiled once as a precompiled header.
#pragma once
#include "shim.h"
#include "mlx/backend/metal/kernels/utils.h"
