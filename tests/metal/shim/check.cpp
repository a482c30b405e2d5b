// Check mode: kernels compiled with -fsanitize=thread call back here for every access to memory.
#include "runtime.h"
#include <stdlib.h>
#include <string.h>

void emu_shadow(Region&, bool) {}
void emu_flush(Worker&) {}
void emu_count_unwritten(const Region&, emu_buffer&) {}
extern "C" void emu_atomic(const void*, uint32_t) {}
