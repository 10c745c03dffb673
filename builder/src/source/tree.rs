//! Finds llama.cpp among paths by its files, not by its name.

use std::collections::BTreeSet;

/// Maximum depth of llama.cpp's folder: `sdist-1.2.3/vendor/llama.cpp` is three deep.
pub(crate) const MAX_ROOT_DEPTH: usize = 4;

/// Possible folders of llama-server's sources, newest layout first.
const SERVER_FOLDERS: [&str; 2] = ["tools/server", "examples/server"];

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TreeLocation {
    pub(crate) root: String,
    pub(crate) server: &'static str,
}

/// Search for llama.cpp among a source's names, which are added one by one.
#[derive(Debug, Default)]
pub(crate) struct TreeSearch {
    /// Folders with a CMakeLists.txt, down to the depth of a server in the deepest root.
    cmake: BTreeSet<String>,
    top: BTreeSet<String>,
}

impl TreeSearch {
    pub(crate) fn add(&mut self, name: &str, is_file: bool) {
        if let Some(first) = name.split('/').next() {
            self.top.insert(first.to_owned());
        }
        let Some(folder) = name.strip_suffix("CMakeLists.txt").filter(|_| is_file) else { return };
        if folder.is_empty() || folder.ends_with('/') {
            // Two more levels for `tools/server`.
            if folder.matches('/').count() <= MAX_ROOT_DEPTH + 2 {
                self.cmake.insert(folder.trim_end_matches('/').to_owned());
            }
        }
    }

    /// The tree nearest to the top; among several at the same depth, the first by name.
    pub(crate) fn tree(&self) -> Option<TreeLocation> {
        let has = |root: &str, part: &str| self.cmake.contains(join_names(root, part).as_str());
        let depth = |root: &str| if root.is_empty() { 0 } else { root.matches('/').count() + 1 };
        self.cmake
            .iter()
            .filter(|root| depth(root) <= MAX_ROOT_DEPTH && has(root, "ggml"))
            .filter_map(|root| {
                let server = SERVER_FOLDERS.into_iter().find(|server| has(root, server))?;
                Some(TreeLocation { root: root.clone(), server })
            })
            .min_by_key(|tree| depth(&tree.root))
    }

    /// Names at the top level, for the error message about a source without llama.cpp.
    pub(crate) fn top(self) -> Vec<String> {
        self.top.into_iter().collect()
    }
}

pub(crate) fn join_names(folder: &str, name: &str) -> String {
    match (folder, name) {
        ("", name) => name.to_owned(),
        (folder, "") => folder.to_owned(),
        (folder, name) => format!("{folder}/{name}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find(names: &[&str]) -> Option<TreeLocation> {
        let mut search = TreeSearch::default();
        for name in names {
            search.add(name, true);
        }
        search.tree()
    }

    fn tree(root: &str) -> [String; 3] {
        ["CMakeLists.txt", "ggml/CMakeLists.txt", "tools/server/CMakeLists.txt"]
            .map(|name| join_names(root, name))
    }

    fn find_owned(names: &[String]) -> Option<TreeLocation> {
        find(&names.iter().map(String::as_str).collect::<Vec<_>>())
    }

    #[test]
    fn a_tree_is_found_at_the_top_and_four_deep_and_not_deeper() {
        assert_eq!(find_owned(&tree("")).unwrap().root, "");
        assert_eq!(find_owned(&tree("a/b/c/d")).unwrap().root, "a/b/c/d");
        assert_eq!(find_owned(&tree("a/b/c/d/e")), None);
    }

    #[test]
    fn an_old_tree_has_its_server_among_the_examples() {
        let found = find(&["x/CMakeLists.txt", "x/ggml/CMakeLists.txt", "x/examples/server/CMakeLists.txt"]);
        assert_eq!(found, Some(TreeLocation { root: "x".into(), server: "examples/server" }));
    }

    #[test]
    fn a_part_of_a_tree_is_no_tree() {
        assert_eq!(find(&["CMakeLists.txt", "ggml/CMakeLists.txt"]), None);
        assert_eq!(find(&["CMakeLists.txt", "tools/server/CMakeLists.txt"]), None);
        assert_eq!(find(&["ggml/CMakeLists.txt", "tools/server/CMakeLists.txt"]), None);
        assert_eq!(find(&["notCMakeLists.txt", "ggml/CMakeLists.txt", "tools/server/CMakeLists.txt"]), None);
    }

    #[test]
    fn the_nearest_of_several_trees_wins() {
        let names = [tree("z/vendor/llama.cpp"), tree("b/llama"), tree("a/llama")].concat();
        assert_eq!(find_owned(&names).unwrap().root, "a/llama");
    }
}
