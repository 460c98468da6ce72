// Ops that wait for a place in flight.
#pragma once

#include <memory>
#include <utility>

#include "backend.h"
#include "transfer.h"

namespace flowstone {

/// First in, first out. They are its links, so that waiting takes no memory. Not locked: its backend does that.
/// Invariant: empty when it is destroyed.
class OpQueue {
public:
    void push(std::unique_ptr<Transfer> transfer) {
        Transfer* const last = transfer.release();
        (first_ == nullptr ? first_ : last_->next) = last;
        last_ = last;
    }

    bool empty() const { return first_ == nullptr; }

    /// Null when empty.
    std::unique_ptr<Transfer> pop() {
        std::unique_ptr<Transfer> transfer(first_);
        if (transfer != nullptr) first_ = std::exchange(transfer->next, nullptr);
        return transfer;
    }

private:
    Transfer* first_ = nullptr;
    Transfer* last_ = nullptr;  // of those there are
};

/// Whether the op's job wants no more of it; only an op that has not begun may be dropped.
inline bool is_unwanted(const Op& op) { return op.stopping != nullptr && op.stopping->load(); }

}  // namespace flowstone
