#include "io/spans.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

namespace flowstone {
namespace {

constexpr std::size_t spans_max = std::size_t{1} << 16;

std::uint32_t this_thread() {
    thread_local const auto number = static_cast<std::uint32_t>(::syscall(SYS_gettid));
    return number;
}

}  // namespace

void Spans::expect(std::size_t count) {
    size_ = std::min(count, spans_max);
    room_ = std::make_unique_for_overwrite<PhaseSpan[]>(size_);
}

void Spans::add(Phase phase, std::int64_t begin_ns, std::uint64_t bytes) noexcept {
    const PhaseSpan span{begin_ns, now_ns(), bytes, this_thread(), phase};
    const std::size_t at = count_.fetch_add(1, std::memory_order_relaxed);
    if (at < size_) {
        room_[at] = span;
        return;
    }
    const std::lock_guard lock(rest_mutex_);
    PhaseSpan& rest = rest_[static_cast<std::size_t>(phase)];
    if (rest.end_ns == 0) {
        rest = span;
        return;
    }
    rest.begin_ns = std::min(rest.begin_ns, span.begin_ns);
    rest.end_ns = std::max(rest.end_ns, span.end_ns);
    rest.bytes += span.bytes;
}

std::vector<PhaseSpan> Spans::all() const {
    std::vector<PhaseSpan> spans(room_.get(), room_.get() + std::min(count_.load(), size_));
    const std::lock_guard lock(rest_mutex_);
    for (const PhaseSpan& rest : rest_)
        if (rest.end_ns != 0) spans.push_back(rest);
    return spans;
}

}  // namespace flowstone
