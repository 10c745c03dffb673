//! Every file below `patches/`, as part of the program. The list is made by the build script.

include!(concat!(env!("OUT_DIR"), "/patches.rs"));

/// All files, sorted by path relative to `patches/`.
pub(crate) fn files() -> &'static [(&'static str, &'static [u8])] {
    FILES
}

/// A file by its path relative to `patches/`, such as `mitigations.toml`.
pub fn embedded_file(path: &str) -> Option<&'static [u8]> {
    files().iter().find(|(name, _)| *name == path).map(|(_, content)| *content)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn on_disk(folder: &Path, name: &str, all: &mut Vec<(String, Vec<u8>)>) {
        for entry in std::fs::read_dir(folder).unwrap().map(Result::unwrap) {
            let name = format!("{name}{}", entry.file_name().to_str().unwrap());
            if entry.file_type().unwrap().is_dir() {
                on_disk(&entry.path(), &format!("{name}/"), all);
            } else {
                all.push((name, std::fs::read(entry.path()).unwrap()));
            }
        }
    }

    #[test]
    fn every_file_below_patches_is_embedded_as_it_is() {
        let mut all = Vec::new();
        on_disk(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../patches"), "", &mut all);
        all.sort();
        let embedded: Vec<_> =
            files().iter().map(|(name, content)| ((*name).to_owned(), content.to_vec())).collect();
        assert!(!all.is_empty());
        assert_eq!(embedded, all);
        assert_eq!(
            embedded_file("README.md"),
            all.iter().find(|(name, _)| name == "README.md").map(|(_, b)| &**b)
        );
    }
}
