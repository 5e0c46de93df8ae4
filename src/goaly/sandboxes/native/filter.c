/* The system calls that a program in a sandbox may not use; all others are allowed. */
#define _GNU_SOURCE
#include "wire.h"

#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <stddef.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#if defined(__x86_64__)
#define ARCH AUDIT_ARCH_X86_64
#elif defined(__aarch64__)
#define ARCH AUDIT_ARCH_AARCH64
#else
#error "sandboxes run on x86_64 and aarch64"
#endif

#define NAMESPACES (CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET | 0x80)
#define LOAD(field) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, field))
#define ANSWER(error) BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (error))
#define REFUSE(call) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (call), 0, 1), ANSWER(EPERM)
/* Kernels number these alike on every architecture; old headers lack them. */
enum { OPEN_TREE = 428, MOVE_MOUNT, FSOPEN, FSCONFIG, FSMOUNT, FSPICK, MOUNT_SETATTR = 442, IO_URING_SETUP = 425, CLONE3 = 435 };

int forbid_system_calls(int debuggable) {
    struct sock_filter program[] = {
        LOAD(arch),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, ARCH, 1, 0), ANSWER(ENOSYS),
        LOAD(nr),
        BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, 0x40000000, 0, 1), ANSWER(ENOSYS),  /* x32 */
        REFUSE(debuggable ? -1 : SYS_ptrace), REFUSE(debuggable ? -1 : SYS_process_vm_writev),
        REFUSE(SYS_add_key), REFUSE(SYS_keyctl), REFUSE(SYS_request_key), REFUSE(SYS_bpf), REFUSE(SYS_userfaultfd),
        REFUSE(SYS_perf_event_open), REFUSE(SYS_open_by_handle_at), REFUSE(SYS_name_to_handle_at),
        REFUSE(SYS_mount), REFUSE(SYS_umount2), REFUSE(SYS_pivot_root), REFUSE(SYS_setns), REFUSE(OPEN_TREE), REFUSE(MOVE_MOUNT),
        REFUSE(FSOPEN), REFUSE(FSCONFIG), REFUSE(FSMOUNT), REFUSE(FSPICK), REFUSE(MOUNT_SETATTR),
        REFUSE(IO_URING_SETUP), REFUSE(IO_URING_SETUP + 1), REFUSE(IO_URING_SETUP + 2),
        REFUSE(SYS_kexec_load), REFUSE(SYS_init_module), REFUSE(SYS_finit_module), REFUSE(SYS_delete_module), REFUSE(SYS_swapon),
        REFUSE(SYS_reboot), REFUSE(SYS_quotactl), REFUSE(SYS_acct), REFUSE(SYS_syslog),
        /* The flags of clone3 are in memory, where a filter cannot look: C libraries then use clone. */
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, CLONE3, 0, 1), ANSWER(ENOSYS),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_clone, 1, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_unshare, 0, 4),
        LOAD(args[0]),
        BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, (uint32_t)NAMESPACES & ~0xffu, 0, 1), ANSWER(EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_ioctl, 0, 4),
        LOAD(args[1]),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 0x5412 /* TIOCSTI */, 1, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 0x541c /* TIOCLINUX */, 0, 1), ANSWER(EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog filter = {sizeof program / sizeof *program, program};
    return prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter);
}
