//! The GPUs as a whole, with a fake NVML (`tests/fake-nvml/nvml.c`) and artificial trees.

use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use warden_policies::VramSource;

use super::*;

mod cards;
mod nvml;
mod places;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// An artificial machine.
struct Machine {
    root: tempfile::TempDir,
    libraries: Vec<OsString>,
}

impl Machine {
    /// A host, not a container, without any GPU.
    fn new() -> Self {
        let machine = Self { root: tempfile::tempdir().unwrap(), libraries: Vec::new() };
        machine.namespace("4026531836");
        machine.process(1, 1).write("proc/self/status", "NSpid:\t9\nNSpgid:\t9\n");
        machine
    }

    fn namespace(&self, number: &str) {
        let link = self.path("proc/self/ns/pid");
        fs::create_dir_all(link.parent().unwrap()).unwrap();
        let _absent = fs::remove_file(&link);
        symlink(format!("pid:[{number}]"), link).unwrap();
    }

    fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    fn write(&self, name: &str, text: &str) -> &Self {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
        self
    }

    /// Adds a process without children, in a group.
    fn process(&self, pid: u32, group: u32) -> &Self {
        self.write(&format!("proc/{pid}/status"), &format!("Name:\tx\nNSpid:\t{pid}\nNSpgid:\t{group}\n"))
            .write(&format!("proc/{pid}/task/{pid}/children"), "")
    }

    /// Adds NVIDIA's library with a script; `flags` are for the compiler.
    fn nvml(mut self, script: &str, flags: &[&str]) -> Self {
        self.script(script);
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fake-nvml/nvml.c");
        let library = self.path("libnvidia-ml.so.1");
        let made = Command::new("cc")
            .args(["-shared", "-fPIC", "-o"])
            .arg(&library)
            .arg(format!("-DSCRIPT=\"{}\"", self.path("script").display()))
            .args(flags)
            .arg(source)
            .status()
            .unwrap();
        assert!(made.success());
        self.libraries = vec![library.into_os_string()];
        self
    }

    /// Sets the library's script from now on.
    fn script(&self, script: &str) {
        self.write("script", script);
    }

    fn open(&self) -> GpuSensors {
        GpuSensors::open_at(GpuSources {
            proc: self.path("proc"),
            host_proc: self.path("host"),
            sys: self.path("sys"),
            wsl: self.path("dxg"),
            nvml: self.libraries.clone(),
        })
    }
}

fn vram(gpu: u32, bytes: u64, source: VramSource) -> VramReading {
    VramReading { gpu: GpuIndex(gpu), bytes, source }
}

fn told(gpu: u32, bytes: u64) -> VramReading {
    vram(gpu, bytes, VramSource::Process)
}
