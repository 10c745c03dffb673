//! Checks the names in a user's own set against existing ones: the configuration refers to fixes, other
//! mitigations and leaks by name alone, and a process has a single environment.

use std::path::Path;

use super::{PatchSet, SetCatalogue, SetOrigin, load};
use crate::error::{PatchError, Result};
use crate::mitigation;

/// Prefixes of variables with a meaning for llama-server, ggml, the dynamic loader or us.
const FOREIGN_PREFIXES: [&str; 8] =
    ["LLAMA_ARG_", "GGML_", "CUDA_", "HIP_", "ROCR_", "LD_", "MALLOC_", "LLAMA_WARDEN_PATHS"];

/// Fails if a name in the set of the folder `path` exists already.
pub(super) fn check_own_names(all: &SetCatalogue, set: &PatchSet, path: &Path) -> Result<()> {
    let wrong = |key: String, why: String| {
        Err(PatchError::Set { file: path.join(load::SET_FILE).display().to_string(), line: None, key, why })
    };
    let list = mitigation::MitigationCatalogue::embedded()?;
    for fix in &set.fixes {
        let key = format!("fix[{}]", fix.id);
        if list.leak(&fix.id).is_some() {
            return wrong(
                key,
                "the name is that of a leak in the list of mitigations: rename the fix".to_owned(),
            );
        }
        if list.mitigation(&fix.id).is_some() {
            let why = "the name is that of a mitigation that needs no patch (`llama-warden mitigations list`): rename the fix";
            return wrong(key, why.to_owned());
        }
        if fix.id.contains("--") || fix.id.starts_with('-') || fix.id.ends_with('-') {
            return wrong(
                key,
                "begin and end it with a letter or a digit, with single dashes between".to_owned(),
            );
        }
        for variable in &fix.variables {
            let key = format!("fix[{}].variable[{}]", fix.id, variable.name);
            if let Some(prefix) = FOREIGN_PREFIXES.iter().find(|prefix| variable.name.starts_with(*prefix)) {
                let why = format!(
                    "variables that begin with {prefix} mean something else to the process: rename it"
                );
                return wrong(key, why);
            }
            let users = all.sets().iter().flat_map(|other| other.fixes.iter().map(move |fix| (other, fix)));
            let taken = users.into_iter().find(|(_, other)| other.variable(&variable.name).is_some());
            if let Some((other, theirs)) = taken {
                let whose = if other.origin == SetOrigin::Embedded { "the curated set" } else { "the set" };
                let why = format!(
                    "{whose} `{}` reads it for its fix {}: one of the two would be switched on by the other; rename it",
                    other.id, theirs.id
                );
                return wrong(key, why);
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn told(fix: &str, variable: &str) -> String {
        let folder = tempfile::tempdir().unwrap();
        let set = folder.path().join("mine");
        fs::create_dir(&set).unwrap();
        let text = format!(
            "schema = 1\nid = \"mine\"\ntitle = \"t\"\n\n[[diff]]\nfile = \"a.patch\"\nfirst = \"b1\"\n\n\
             [[fix]]\nid = \"{fix}\"\ntitle = \"t\"\nsymptom = \"s\"\n\n\
             [[fix.variable]]\nname = \"{variable}\"\ntype = \"flag\"\n"
        );
        fs::write(set.join("set.toml"), text).unwrap();
        fs::write(set.join("a.patch"), "--- a/x\n+++ b/x\n@@ -1 +1,2 @@\n a\n+b\n").unwrap();
        match SetCatalogue::embedded().unwrap().with_folder(folder.path()) {
            Ok(_) => "fine".to_owned(),
            Err(error) => error.to_string().split_once("set.toml").unwrap().1.to_owned(),
        }
    }

    #[test]
    fn a_set_of_ones_own_takes_no_name_that_means_something_else() {
        assert_eq!(told("mine-fix", "MINE"), "fine");
        let all = [
            told("graph-cache-cap", "MINE"),
            told("no-cuda-graphs", "MINE"),
            told("cuda-graph-window", "MINE"),
            told("-mine", "MINE"),
            told("mine-fix", "LLAMA_WARDEN_RECLAIM"),
            told("mine-fix", "LLAMA_ARG_CTX_SIZE"),
        ];
        insta::assert_snapshot!(all.join("\n"));
    }

    #[test]
    fn a_folder_that_is_named_twice_is_read_once() {
        let folder = tempfile::tempdir().unwrap();
        let set = folder.path().join("mine");
        fs::create_dir(&set).unwrap();
        fs::write(
            set.join("set.toml"),
            "schema = 1\nid = \"mine\"\ntitle = \"t\"\n[[diff]]\nfile = \"a.patch\"\nfirst = \"b1\"\n",
        )
        .unwrap();
        fs::write(set.join("a.patch"), "--- a/x\n+++ b/x\n@@ -1 +1,2 @@\n a\n+b\n").unwrap();
        let all =
            SetCatalogue::embedded().unwrap().with_folder(folder.path()).unwrap().with_folder(&set).unwrap();
        assert_eq!(all.sets().iter().filter(|set| set.id == "mine").count(), 1);
    }
}
