#include "io/priority.h"

#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace flowstone {
namespace {

// With this nice value a thread gets a third of the processor time of a competing normal thread, and all idle time.
constexpr int background_nice = 5;
constexpr int nice_max = 19;

// linux/ioprio.h, which older systems do not install.
constexpr int ioprio_who_process = 1;
constexpr int ioprio_best_effort_lowest = (2 << 13) | 7;

}  // namespace

void assume(Priority priority) {
    if (priority == Priority::normal) return;
    // Both calls apply to one thread here, despite their names. A job may already run at low priority.
    const auto self = static_cast<id_t>(::syscall(SYS_gettid));
    errno = 0;
    const int nice = ::getpriority(PRIO_PROCESS, self);
    if (errno == 0) (void)::setpriority(PRIO_PROCESS, self, std::min(nice + background_nice, nice_max));
    (void)::syscall(SYS_ioprio_set, ioprio_who_process, 0, ioprio_best_effort_lowest);
}

}  // namespace flowstone
