//! Sources of llama.cpp from eighteen months, from the source archives of llama-cpp-python.
//! `warden-test-store` keeps them: the first run downloads some 70 MB for each.

use std::path::PathBuf;
use std::process::Command;

use warden_builder::EventReporter;
use warden_builder::sdist::SdistPin;

use crate::{Context as _, Trouble, binaries};

/// Version of the sources.
#[derive(Clone, Copy, Debug)]
pub struct Era {
    /// Version of llama-cpp-python.
    pub version: &'static str,
    /// Hash of the archive.
    pub sha256: &'static str,
    /// llama.cpp's build number in upstream's history; unknown for the last one.
    pub build: Option<u32>,
}

const fn era(version: &'static str, build: u32, sha256: &'static str) -> Era {
    Era { version, sha256, build: Some(build) }
}

/// From May 2025 to October 2026. In between came the graph lock (b5717), the split of the server's files
/// (b7146), the pools by stream (b7203), the map of graphs (b7821), its sweep (b8832) and the workspaces
/// (b10528).
pub const ERAS: [Era; 8] = [
    era("0.3.9", 5308, "a3a985f558385e2f5de5b663f4e9b0817506d6af98122450142cd98e79216370"),
    era("0.3.12", 5833, "0c977101a46ce6fa363e63a0b33413f29deab9772be24a6c551458fc386f4725"),
    era("0.3.16", 6170, "34ed0f9bd9431af045bb63d9324ae620ad0536653740e9bb163a2e1fcb973be6"),
    era("0.3.20", 8643, "70f01b7d915d31c617dc66610a332cb2d51cde84c8b152d09a352206323616f5"),
    era("0.3.22", 9007, "93c54af95d917fe6d6d70039efe16ca9240634d11010f5aaf795261b9f43042f"),
    era("0.3.28", 9553, "958227b394f413425d6039952096daa0b8b98328c6b99d652862aec775f1672d"),
    era("0.3.35", 10454, "1139dbb54509074b70893fab8554e3b079aa9f4d312058ce4018ef0019e3de12"),
    Era {
        version: "0.3.36",
        sha256: "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
        build: None,
    },
];

impl Era {
    /// Path of the source archive.
    ///
    /// # Errors
    /// The download fails, or its hash differs from the pinned one.
    pub async fn archive(&self) -> Result<PathBuf, Trouble> {
        let _turn = binaries::PIP.lock().await;
        let builder = binaries::store_builder(EventReporter::silent())?;
        let pin = SdistPin { version: self.version.into(), sha256: self.sha256.into() };
        builder.sdist(&pin).await.context(format!("llama-cpp-python {}", self.version))
    }

    /// Unpacks a fresh copy of the files that patches concern.
    ///
    /// # Errors
    /// The archive cannot be downloaded or unpacked.
    pub async fn tree(&self) -> Result<tempfile::TempDir, Trouble> {
        let archive = self.archive().await?;
        let into = tempfile::tempdir()?;
        let parts = [
            "CMakeLists.txt",
            "ggml/CMakeLists.txt",
            "ggml/src/ggml-cuda",
            "tools/server",
            "examples/server",
        ];
        let status = Command::new("tar")
            .arg("xzf")
            .arg(&archive)
            .arg("-C")
            .arg(into.path())
            .args(["--strip-components=3", "--wildcards", "--exclude=*/public*", "--exclude=*/webui/*"])
            .args(parts.map(|part| format!("*/vendor/llama.cpp/{part}*")))
            .stderr(std::process::Stdio::null())
            .status()?;
        // Newer trees have no examples/server, older ones no tools/server, so tar fails in any case.
        let whole = into.path().join("ggml/src/ggml-cuda/common.cuh").exists();
        if whole { Ok(into) } else { Err(Trouble::new(format!("tar: {status} for {}", archive.display()))) }
    }
}
