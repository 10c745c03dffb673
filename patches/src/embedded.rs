//! All files of the curated sets and the list of mitigations, embedded by the build script.

include!(concat!(env!("OUT_DIR"), "/patches.rs"));

/// All files, sorted by path relative to `patches/`.
pub(crate) fn embedded_files() -> &'static [(&'static str, &'static [u8])] {
    FILES
}

pub(crate) fn embedded_file(path: &str) -> Option<&'static [u8]> {
    embedded_files().iter().find(|(name, _)| *name == path).map(|(_, content)| *content)
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
    fn the_sets_and_the_mitigations_are_embedded_as_they_are() {
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        let mut all =
            vec![("mitigations.toml".to_owned(), std::fs::read(here.join("mitigations.toml")).unwrap())];
        for set in ["cuda-memory", "server"] {
            on_disk(&here.join(set), &format!("{set}/"), &mut all);
        }
        all.sort();
        let embedded: Vec<_> =
            embedded_files().iter().map(|(name, content)| ((*name).to_owned(), content.to_vec())).collect();
        assert_eq!(embedded, all);
        assert_eq!(
            embedded_file("mitigations.toml"),
            all.iter().find(|(name, _)| !name.contains('/')).map(|(_, b)| &**b)
        );
    }
}
