// Ops that wait for a place in flight.
#pragma once

#include <deque>
#include <memory>
#include <utility>

#include "backend.h"

namespace flowstone {

/// First in, first out, urgent ops before the others. Not locked: its backend does that.
class OpQueue {
public:
    void push(std::unique_ptr<Op> op) { (op->urgent ? urgent_ : ordinary_).push_back(std::move(op)); }
    bool empty() const { return urgent_.empty() && ordinary_.empty(); }

    /// Null when empty.
    std::unique_ptr<Op> pop() {
        std::deque<std::unique_ptr<Op>>& queue = urgent_.empty() ? ordinary_ : urgent_;
        if (queue.empty()) return nullptr;
        std::unique_ptr<Op> op = std::move(queue.front());
        queue.pop_front();
        return op;
    }

private:
    std::deque<std::unique_ptr<Op>> urgent_;
    std::deque<std::unique_ptr<Op>> ordinary_;
};

/// Whether the op's job wants no more of it; only an op that has not begun may be dropped.
inline bool is_unwanted(const Op& op) { return op.stopping != nullptr && op.stopping->load(); }

}  // namespace flowstone
