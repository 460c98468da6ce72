// Whose work comes first.
#pragma once

namespace flowstone {

/// A thread that works beside training gives way to it. Nobody can take that back without privileges.
enum class Priority { normal, background };

/// Set the calling thread's. Advice: where the system refuses, the thread stays as it is.
void assume(Priority priority);

}  // namespace flowstone
