//! Lists every file below `patches/`, so that the sets are part of the binary. Runs again when a file there is
//! added, changed or removed.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::{env, fs, io};

fn main() -> io::Result<()> {
    let variable = |name| env::var_os(name).map(PathBuf::from).ok_or_else(|| io::Error::other(name));
    // Cargo looks at a folder's whole content.
    println!("cargo::rerun-if-changed=../patches");
    println!("cargo::rerun-if-changed=build.rs");
    let mut files = Vec::new();
    list(&variable("CARGO_MANIFEST_DIR")?.join("../patches").canonicalize()?, "", &mut files)?;
    files.sort();
    let mut code = String::from("static FILES: &[(&str, &[u8])] = &[\n");
    for (name, path) in files {
        let _infallible = writeln!(code, "    ({name:?}, include_bytes!({:?})),", path.display().to_string());
    }
    code.push_str("];\n");
    fs::write(variable("OUT_DIR")?.join("patches.rs"), code)
}

fn list(folder: &Path, name: &str, files: &mut Vec<(String, PathBuf)>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let own = entry
            .file_name()
            .into_string()
            .map_err(|_| io::Error::other("a name below patches/ is not UTF-8"))?;
        let name = format!("{name}{own}");
        if entry.file_type()?.is_dir() {
            list(&entry.path(), &format!("{name}/"), files)?;
        } else {
            files.push((name, entry.path()));
        }
    }
    Ok(())
}
