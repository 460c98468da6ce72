// What a thread is called: in ps and in a debugger, and in the inventory of docs/ARCHITECTURE.md.
#pragma once

#include <pthread.h>

namespace flowstone {

/// Call the calling thread `name`, of at most 15 characters. Advice: where the system refuses, it keeps its creator's.
inline void name_this_thread(const char* name) noexcept { (void)::pthread_setname_np(::pthread_self(), name); }

}  // namespace flowstone
