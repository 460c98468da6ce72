// Thread priorities.
#pragma once

namespace flowstone {

/// `background` threads yield to training. Without privileges, a thread cannot raise its priority again.
enum class Priority { normal, background };

/// Set the calling thread's priority. A hint: if the system refuses, nothing changes.
void assume(Priority priority);

}  // namespace flowstone
