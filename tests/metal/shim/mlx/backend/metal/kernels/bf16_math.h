// The bfloat overloads of MLX use compiler internals of Metal; shim.h brings its own.
#pragma once
