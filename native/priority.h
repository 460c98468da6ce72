// Thread priorities.
#pragma once

namespace flowstone {

/// A thread that works beside training yields to it. Without privileges, a thread cannot raise its priority again.
enum class Priority { normal, background };

/// Set the calling thread's priority. A hint: if the system refuses, nothing changes.
void assume(Priority priority);

}  // namespace flowstone
