//! Library to preload into llama-server (`LD_PRELOAD`): counts host and GPU allocations by call site.
//!
//! The library intercepts functions of the C library and of CUDA, calls the real ones, and records live
//! allocations in a mapped file (`layout.rs`) for the reader. It never changes a function's effect or result,
//! never allocates, and never blocks for long. Nothing is counted unless the environment names a folder to
//! publish in. No code here panics, because a panic would crash the server.
//!
//! A program can still notice the library: functions have addresses in it, CUDA's names exist without CUDA
//! (`dynamic.rs`), libgcc is loaded into programs that do not need it, and libraries with intercepted
//! functions stay loaded.
//!
//! | file | content |
//! |---|---|
//! | `start` | set-up before `main`: maps, header, switch |
//! | `heap`, `map`, `cuda`, `dynamic` | intercepted functions |
//! | `real`, `loaded` | look-up of the real functions |
//! | `arena` | blocks for allocations during the look-up |
//! | `count` | sampling, and the weight of a sample |
//! | `sites`, `live`, `ranges` | records by call site; live blocks and handles; live mappings |
//! | `walk`, `registered` | return addresses; conditions under which they must not be read |
//! | `state`, `local` | addresses of the maps; per-thread state |
//! | `sys` | declarations of the C library |

#![expect(unsafe_code, reason = "it stands in for functions of C, between programs and the C library")]
#![cfg_attr(test, expect(dead_code, non_snake_case, reason = "a test does not stand in for anything"))]
#![cfg(all(target_os = "linux", target_env = "gnu", any(target_arch = "x86_64", target_arch = "aarch64")))]

mod arena;
mod count;
mod cuda;
mod dynamic;
mod heap;
pub mod layout;
mod live;
mod loaded;
mod local;
mod map;
mod ranges;
mod real;
mod registered;
mod sites;
mod start;
mod state;
mod sys;
mod walk;
