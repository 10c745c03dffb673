//! Gives memory back on demand, like a patched llama-server, by the file in `LLAMA_WARDEN_RECLAIM`. The
//! layout is implemented independently of the supervisor's.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{FlockOperation, fcntl_lock};
use serde::{Deserialize, Serialize};

use crate::engine::Engine;
use crate::say;

const BLOCK: u64 = 64;
const HEAP: u32 = 8;
const HEAP_BLOCK: u64 = 2 * BLOCK;
const CUDA_BLOCK: u64 = 18 * BLOCK;

/// Behaviour on requests; a script without it simulates a build that ignores the variable.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Reclaim {
    /// `heap`, `cuda` or `both`.
    pub(crate) parts: Parts,
    /// Share of the leaked memory that is given back.
    pub(crate) gives: f64,
    /// Milliseconds until the answer.
    pub(crate) takes_ms: u64,
    pub(crate) how: How,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Parts {
    Heap,
    Cuda,
    #[default]
    Both,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum How {
    #[default]
    Done,
    /// Answers that a part was in use.
    Partly,
    /// Never answers.
    Silent,
    /// Answers with invalid bytes.
    Garbage,
}

impl Default for Reclaim {
    fn default() -> Self {
        Self { parts: Parts::Both, gives: 1.0, takes_ms: 0, how: How::Done }
    }
}

pub(crate) async fn run(engine: Arc<Engine>, reclaim: Reclaim) {
    let Some(path) = std::env::var_os("LLAMA_WARDEN_RECLAIM").filter(|path| !path.is_empty()) else { return };
    let opened = OpenOptions::new().read(true).write(true).open(&path).and_then(|file| {
        let mut magic = [0; 8];
        file.read_exact_at(&mut magic, 0)?;
        if magic != *b"LWRECL1\0" {
            return Err(std::io::Error::other("another kind of file"));
        }
        // Lock the whole file, because no other process uses it.
        fcntl_lock(&file, FlockOperation::NonBlockingLockExclusive)?;
        Ok(file)
    });
    match opened {
        Ok(file) => {
            if let Err(error) = serve(&engine, &reclaim, &file).await {
                say::err(&format!("fake-llama: reclaim: {error}"));
            }
        }
        Err(error) => say::err(&format!("fake-llama: reclaim: {error}")),
    }
}

async fn serve(engine: &Engine, reclaim: &Reclaim, file: &File) -> std::io::Result<()> {
    let mut seen = asked(file).map_or(0, |(seq, _)| seq);
    let has = |part: Parts| reclaim.parts == part || reclaim.parts == Parts::Both;
    for (part, at) in [(Parts::Heap, HEAP_BLOCK), (Parts::Cuda, CUDA_BLOCK)] {
        if has(part) {
            file.write_all_at(&answer(seen, 0, 0, 0), at)?;
        }
    }
    loop {
        tokio::time::sleep(Duration::from_millis(10)).await;
        let Some((seq, what)) = asked(file).filter(|(seq, _)| *seq > seen) else { continue };
        seen = seq;
        if reclaim.how == How::Silent {
            continue;
        }
        tokio::time::sleep(Duration::from_millis(reclaim.takes_ms)).await;
        let at = if what & HEAP == 0 { CUDA_BLOCK } else { HEAP_BLOCK };
        // The leak is on the heap if there is no CUDA part that could hold it.
        let holds = what & HEAP == 0 || !has(Parts::Cuda);
        let bytes = if holds { engine.leak.give_back(reclaim.gives) } else { 0 };
        let block = match reclaim.how {
            How::Garbage => vec![0xA5; 64],
            How::Partly => answer(seq, bytes, 2, reclaim.takes_ms),
            How::Done | How::Silent => answer(seq, bytes, 1, reclaim.takes_ms),
        };
        file.write_all_at(&block, at)?;
    }
}

fn check(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

/// Returns number and parts of the present request.
fn asked(file: &File) -> Option<(u64, u32)> {
    let mut block = [0; 64];
    file.read_exact_at(&mut block, BLOCK).ok()?;
    let (bytes, told) = block.split_at(56);
    (told == check(bytes).to_ne_bytes()).then_some(())?;
    let seq = u64::from_ne_bytes(bytes.get(..8)?.try_into().ok()?);
    Some((seq, u32::from_ne_bytes(bytes.get(8..12)?.try_into().ok()?)))
}

fn answer(seq: u64, bytes: u64, result: u16, ms: u64) -> Vec<u8> {
    let mut block = seq.to_ne_bytes().to_vec();
    block.extend(bytes.to_ne_bytes());
    block.resize(40, 0);
    block.extend(u32::try_from(ms).unwrap_or(u32::MAX).to_ne_bytes());
    block.extend(result.to_ne_bytes());
    block.extend(0_u16.to_ne_bytes());
    block.extend(std::process::id().to_ne_bytes());
    block.resize(56, 0);
    block.extend(check(&block).to_ne_bytes());
    block
}
