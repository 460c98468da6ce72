// Ops that wait for a place in flight.
#pragma once

#include <memory>
#include <utility>

#include "backend.h"
#include "transfer.h"

namespace flowstone {

/// First in, first out, urgent ones before the others. They are its links, so that waiting takes no memory. Not locked: its
/// backend does that.
/// Invariant: empty when it is destroyed.
class OpQueue {
public:
    void push(std::unique_ptr<Transfer> transfer) {
        List& list = transfer->op().urgent ? urgent_ : ordinary_;
        Transfer* const last = transfer.release();
        (list.first == nullptr ? list.first : list.last->next) = last;
        list.last = last;
    }

    bool empty() const { return urgent_.first == nullptr && ordinary_.first == nullptr; }

    /// Null when empty.
    std::unique_ptr<Transfer> pop() {
        List& list = urgent_.first == nullptr ? ordinary_ : urgent_;
        std::unique_ptr<Transfer> transfer(list.first);
        if (transfer != nullptr) list.first = std::exchange(transfer->next, nullptr);
        return transfer;
    }

private:
    struct List {
        Transfer* first = nullptr;
        Transfer* last = nullptr;  // of those there are
    };

    List urgent_;
    List ordinary_;
};

/// Whether the op's job wants no more of it; only an op that has not begun may be dropped.
inline bool is_unwanted(const Op& op) { return op.stopping != nullptr && op.stopping->load(); }

}  // namespace flowstone
