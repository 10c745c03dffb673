//! Simulated NVIDIA GPUs: a `libnvidia-ml.so.1` made from `tests/fake-nvml/nvml.c`, and its script, which may
//! change at any time.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::{Home, Trouble};

/// GPU as NVML reports it.
#[derive(Clone, Debug, Default)]
pub struct FakeGpu {
    /// Bytes of memory.
    pub total: u64,
    /// Bytes in use by all processes.
    pub used: u64,
    /// Processes that compute on the GPU, with their bytes; some containers report 0.
    pub processes: Vec<(u32, u64)>,
    /// Xids, each reported once.
    pub xids: Vec<u64>,
}

impl FakeGpu {
    /// Creates a GPU on which each process holds `each` bytes.
    pub fn shared_by(pids: &[u32], total: u64, each: u64) -> Self {
        let used = each * pids.len() as u64;
        Self { total, used, processes: pids.iter().map(|pid| (*pid, each)).collect(), xids: Vec::new() }
    }
}

/// The library, and its script.
#[derive(Debug)]
pub struct FakeNvml {
    folder: PathBuf,
}

impl FakeNvml {
    /// Makes the library in a folder below `folder`; there is no GPU yet.
    ///
    /// # Errors
    /// There is no C compiler, or files cannot be written.
    pub fn new(folder: &Path) -> Result<Self, Trouble> {
        let fake = Self { folder: folder.join("nvml") };
        std::fs::create_dir_all(&fake.folder)?;
        fake.say(&[])?;
        let made = Command::new("cc")
            .args(["-O2", "-shared", "-fPIC", "-o"])
            .arg(fake.library())
            .arg(format!("-DSCRIPT=\"{}\"", fake.script().display()))
            .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("fake-nvml/nvml.c"))
            .status()?;
        if made.success() { Ok(fake) } else { Err(Trouble::new("cc could not make the library")) }
    }

    /// Makes the library in a home, so that programs there find it instead of a real driver's.
    ///
    /// # Errors
    /// The same as for [`Self::new`].
    pub fn in_home(home: &mut Home) -> Result<Self, Trouble> {
        let fake = Self::new(home.path())?;
        home.env.insert(OsString::from("LD_LIBRARY_PATH"), fake.folder.clone().into_os_string());
        Ok(fake)
    }

    /// Path of the library.
    pub fn library(&self) -> PathBuf {
        self.folder.join("libnvidia-ml.so.1")
    }

    /// Path of the script, for a fake-llama that reports its own VRAM (`vram_told`).
    pub fn script(&self) -> PathBuf {
        self.folder.join("script")
    }

    /// Sets the GPUs. A running program has counted them at its start.
    ///
    /// # Errors
    /// The script cannot be written.
    pub fn say(&self, gpus: &[FakeGpu]) -> Result<(), Trouble> {
        let mut text = String::new();
        for (number, gpu) in gpus.iter().enumerate() {
            let FakeGpu { total, used, processes, xids } = gpu;
            writeln!(text, "device -1 {total} {used} 00000000:{number:02X}:00.0 GPU-{number} Fake GPU")?;
            for (pid, bytes) in processes {
                writeln!(text, "compute {number} {pid} {bytes}")?;
            }
            for xid in xids {
                writeln!(text, "xid {number} {xid}")?;
            }
        }
        // The library may read the script at any time, so replace it atomically.
        let new = self.folder.join("script.new");
        std::fs::write(&new, text)?;
        Ok(std::fs::rename(new, self.script())?)
    }
}
