// Mappings of files into this process.

#pragma once

#include <cstddef>
#include <sys/types.h>

namespace paceline {

std::size_t page_nbytes();

// A part of a file, readable and writable, for as long as the object lives.
class Mapping {
public:
    enum class Kind {
        shared,        // writes reach everybody
        copy_on_write  // the file's content until a page is written, which then is this process's own
    };

    // `offset` and `nbytes` are whole pages of the file. All pages are mapped at once, so that no later access
    // has to wait for it. Throws std::system_error.
    Mapping(int fd, off_t offset, std::size_t nbytes, Kind kind);
    ~Mapping();
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;

    char* data() const { return data_; }
    std::size_t nbytes() const { return nbytes_; }

    // Copy-on-write only: give up the pages of a range that were written, so that it shows the
    // file's content again. Return their bytes; all of the range if the kernel does not tell.
    std::size_t refresh(std::size_t offset, std::size_t nbytes) const;

private:
    char* data_;
    std::size_t nbytes_;
    int pagemap_ = -1;  // tells which pages were written; copy-on-write only
};

}  // namespace paceline
