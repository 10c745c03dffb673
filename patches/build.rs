//! Generates code that embeds the patch sets and the list of mitigations. Cargo reruns this script by default
//! when a file of this folder changes. The generated code does not contain this folder's path, so that builds
//! in any folder give the same bytes.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::{env, fs, io};

fn main() -> io::Result<()> {
    let variable = |name| env::var_os(name).map(PathBuf::from).ok_or_else(|| io::Error::other(name));
    let here = variable("CARGO_MANIFEST_DIR")?;
    let mut files = vec!["mitigations.toml".to_owned()];
    for entry in fs::read_dir(&here)? {
        let folder = entry?.path();
        if folder.join("set.toml").is_file() {
            list(&folder, &format!("{}/", name_of(&folder)?), &mut files)?;
        }
    }
    files.sort();
    let mut code = String::from("static FILES: &[(&str, &[u8])] = &[\n");
    for name in files {
        let path = format!("concat!(env!(\"CARGO_MANIFEST_DIR\"), {:?})", format!("/{name}"));
        let _infallible = writeln!(code, "    ({name:?}, include_bytes!({path})),");
    }
    code.push_str("];\n");
    fs::write(variable("OUT_DIR")?.join("patches.rs"), code)
}

fn list(folder: &Path, name: &str, files: &mut Vec<String>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let name = format!("{name}{}", name_of(&entry.path())?);
        if entry.file_type()?.is_dir() {
            list(&entry.path(), &format!("{name}/"), files)?;
        } else {
            files.push(name);
        }
    }
    Ok(())
}

fn name_of(path: &Path) -> io::Result<&str> {
    let name = path.file_name().and_then(|name| name.to_str());
    name.ok_or_else(|| io::Error::other("a name below patches/ is not UTF-8"))
}
