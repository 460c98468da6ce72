// Thread names: for ps and debuggers, and for the inventory in docs/ARCHITECTURE.md.
#pragma once

#include <pthread.h>

namespace flowstone {

/// Name the calling thread, with at most 15 characters. A hint: if the system refuses, it keeps its creator's name.
inline void name_this_thread(const char* name) noexcept { (void)::pthread_setname_np(::pthread_self(), name); }

}  // namespace flowstone
