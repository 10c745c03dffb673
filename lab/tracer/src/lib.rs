//! A library to preload into llama-server (`LD_PRELOAD`): counts what is allocated, by call site, on the host and on GPUs.
//!
//! It stands in front of the C library's and CUDA's functions, calls the real ones, and notes what lives in a file that it
//! keeps mapped (`layout.rs`); whoever reads the file does the rest. It never changes what a function does or returns, never
//! allocates, never waits for long, and counts nothing unless the environment names a folder to publish in. Nothing in here
//! panics: a fault of ours would be a crash of the server.
//!
//! That it is there can be seen, though: functions have addresses in it, the names of CUDA are there without CUDA
//! (`dynamic.rs`), libgcc is loaded into programs that would not have it, and a library whose functions are behind ours stays
//! loaded.
//!
//! | file | job |
//! |---|---|
//! | `start` | before `main`: maps, header, switch |
//! | `heap`, `map`, `cuda`, `dynamic` | the functions that we stand in for |
//! | `real`, `loaded` | the functions behind them |
//! | `arena` | blocks for whoever allocates meanwhile |
//! | `count` | sampling, and what a sample stands for |
//! | `sites`, `live`, `ranges` | records by call site; what lives: blocks and handles, mappings |
//! | `walk`, `registered` | return addresses; when nobody may look for them |
//! | `state`, `local` | where the maps are; what a thread keeps |
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
