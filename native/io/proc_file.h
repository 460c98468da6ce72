// Descriptors, and the kernel's files under /proc and /sys.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <string>
#include <utility>

namespace flowstone {

/// A file descriptor, closed at destruction.
class Descriptor {
public:
    explicit Descriptor(int number) : number_(number) {}
    ~Descriptor() {
        if (number_ >= 0) ::close(number_);
    }
    Descriptor(const Descriptor&) = delete;
    Descriptor& operator=(const Descriptor&) = delete;

    int number() const { return number_; }
    int take() { return std::exchange(number_, -1); }

private:
    int number_;
};

/// The text of a file of unknown size, such as in /proc; empty if it cannot be opened.
inline std::string read_whole(const char* path) {
    const Descriptor file(::open(path, O_RDONLY | O_CLOEXEC));
    std::string text;
    std::array<char, 1 << 16> part;
    ssize_t count = 0;
    while (file.number() >= 0 && (count = ::read(file.number(), part.data(), part.size())) > 0)
        text.append(part.data(), static_cast<std::size_t>(count));
    return text;
}

}  // namespace flowstone
