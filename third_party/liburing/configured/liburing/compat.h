/* SPDX-License-Identifier: MIT */
/* Flowstone's, in the place of what liburing's configure writes: asked of the preprocessor, so that one copy serves the
   headers of Linux 4.18 (manylinux_2_28) and all newer ones. */
#ifndef LIBURING_COMPAT_H
#define LIBURING_COMPAT_H

#include <linux/fs.h> /* __kernel_rwf_t */
#include <linux/ioctl.h>
#include <stdint.h>

#if __has_include(<linux/time_types.h>)
#include <linux/time_types.h>
#else
struct __kernel_timespec {
	int64_t		tv_sec;
	long long	tv_nsec;
};
#endif
/* <linux/time_types.h> is included above where it exists, and is not needed again */
#define UAPI_LINUX_IO_URING_H_SKIP_LINUX_TIME_TYPES_H 1

#if __has_include(<linux/openat2.h>)
#include <linux/openat2.h>
#else
struct open_how {
	uint64_t	flags;
	uint64_t	mode;
	uint64_t	resolve;
};
#endif

#include <linux/futex.h>
#ifndef FUTEX_WAITV_MAX
#define FUTEX_32	2
#define FUTEX_WAITV_MAX	128

struct futex_waitv {
	uint64_t	val;
	uint64_t	uaddr;
	uint32_t	flags;
	uint32_t	__reserved;
};
#endif

#if __has_include(<linux/blkdev.h>)
#include <linux/blkdev.h>
#endif
#ifndef BLOCK_URING_CMD_DISCARD
#define BLOCK_URING_CMD_DISCARD _IO(0x12, 0)
#endif

#endif
