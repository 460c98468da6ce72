// A queue of ops to be submitted.
#pragma once

#include <memory>
#include <utility>

#include "io/backend.h"
#include "io/transfer.h"

namespace flowstone {

/// First in, first out. The ops are the list's links, so that queueing allocates nothing. Not locked: the backend
/// locks.
/// Invariant: empty at destruction.
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
    Transfer* last_ = nullptr;  // valid if first_ is not null
};

/// Whether the op's job has stopped; only an op that has not begun may be dropped.
inline bool is_unwanted(const Op& op) { return op.stopping != nullptr && op.stopping->load(); }

}  // namespace flowstone
