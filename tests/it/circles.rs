//! Circles of files: files of one crate that use each other, directly or through other files. A reader has to
//! know all files of a circle to understand one of them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use regex::Regex;
use warden_rig::{Outcome, Trouble};

use crate::layout::{metadata, rust_files};

/// Most files of a circle.
const MOST_FILES: usize = 6;
/// Most imports through which a name is followed to its definition.
const MOST_REEXPORTS: usize = 8;

type ModulePath = Vec<String>;

struct SourceFile {
    /// Imported names, with their paths; other files may use them through this one.
    imports: BTreeMap<String, ModulePath>,
    /// Paths that the code of this file uses; re-exports are no use.
    used: BTreeSet<ModulePath>,
}

type SourceFiles = BTreeMap<ModulePath, SourceFile>;

#[test]
fn files_use_each_other_in_small_circles_only() -> Outcome {
    let mut wrong = Vec::new();
    for package in metadata()?.workspace_packages() {
        let folder = package.manifest_path.parent().map(|folder| folder.as_std_path().to_owned());
        let Some(source) = folder.map(|folder| folder.join("src")).filter(|source| source.is_dir()) else {
            continue;
        };
        let files = read_files(&source)?;
        let largest = largest_circle(&files);
        println!("{}: {} files in the largest circle (bound {MOST_FILES})", package.name, largest.len());
        if largest.len() > MOST_FILES {
            let modules: Vec<String> = largest.iter().map(|module| module.join("::")).collect();
            wrong.push(format!("{}: {} files: {}", package.name, modules.len(), modules.join(", ")));
        }
    }
    assert!(wrong.is_empty(), "these files use each other:\n{}", wrong.join("\n"));
    Ok(())
}

/// Reads the files of a crate that contain more than tests.
fn read_files(source: &Path) -> Result<SourceFiles, Trouble> {
    let import = Regex::new(r"(?m)^\s*(pub(?:\([^)]*\))?\s+)?use\s+([^;]+);")?;
    let path = Regex::new(r"(?:\w+::)+\w+")?;
    let ignored = Regex::new(r"(?m)//.*$|pub\(in [^)]*\)|^#\[cfg\(test\)\]\n(?:pub\S* )?mod \w+ \{(?s:.*)")?;
    let mut files = SourceFiles::new();
    for file in rust_files(source)? {
        let place = file.strip_prefix(source)?.with_extension("");
        let mut module: ModulePath = place.iter().map(|part| part.to_string_lossy().into_owned()).collect();
        if module.iter().any(|part| part.ends_with("tests")) {
            continue;
        }
        module.pop_if(|last| ["mod", "lib", "main"].contains(&last.as_str()));
        let text = std::fs::read_to_string(&file)?;
        let code = ignored.replace_all(&text, "");
        let (mut imports, mut used) = (BTreeMap::new(), BTreeSet::new());
        for found in import.captures_iter(&code) {
            for (name, path) in expand_import(&found[2]) {
                imports.insert(name, path.clone());
                if found.get(1).is_none() {
                    used.insert(path);
                }
            }
        }
        let body = import.replace_all(&code, "");
        used.extend(path.find_iter(&body).map(|found| split_path(found.as_str())));
        files.insert(module, SourceFile { imports, used });
    }
    Ok(files)
}

fn split_path(text: &str) -> ModulePath {
    text.split("::").map(|part| part.trim().to_owned()).filter(|part| !part.is_empty()).collect()
}

/// Returns the names that an import introduces: `a::{b, c as d}` gives `b` for `a::b`, and `d` for `a::c`.
fn expand_import(tree: &str) -> Vec<(String, ModulePath)> {
    let Some((prefix, list)) = tree.split_once('{') else {
        let (path, name) = tree.split_once(" as ").unwrap_or((tree, ""));
        let mut path = split_path(path);
        path.pop_if(|last| last == "self");
        let name =
            Some(name.trim().to_owned()).filter(|name| !name.is_empty()).or_else(|| path.last().cloned());
        return name.map(|name| (name, path)).into_iter().collect();
    };
    let (mut parts, mut depth) = (vec![String::new()], 0);
    for letter in list.trim_end().trim_end_matches('}').chars() {
        depth += i32::from(letter == '{') - i32::from(letter == '}');
        match parts.last_mut() {
            Some(part) if letter != ',' || depth > 0 => part.push(letter),
            _ => parts.push(String::new()),
        }
    }
    let parts = parts.iter().map(|part| part.trim()).filter(|part| !part.is_empty());
    parts.flat_map(|part| expand_import(&format!("{prefix}{part}"))).collect()
}

/// Returns the module with the definition that a path names in a module; `None` for other crates.
fn resolve(files: &SourceFiles, from: &[String], path: &[String], reexports: usize) -> Option<ModulePath> {
    let child = |module: &[String], name: &String| [module, std::slice::from_ref(name)].concat();
    let (mut module, mut rest) = (from.to_vec(), path);
    match path.first()?.as_str() {
        "crate" => (module, rest) = (Vec::new(), &path[1..]),
        "self" => rest = &path[1..],
        "super" => {
            let levels = path.iter().take_while(|part| *part == "super").count();
            module.truncate(from.len().checked_sub(levels)?);
            rest = &path[levels..];
        }
        _ if files.contains_key(&child(from, &path[0])) => {}
        _ => {
            let imported = files.get(from)?.imports.get(&path[0])?;
            let whole = [imported, &path[1..]].concat();
            return resolve(files, from, &whole, reexports.checked_sub(1)?);
        }
    }
    while let Some((name, more)) = rest.split_first()
        && files.contains_key(&child(&module, name))
    {
        module.push(name.clone());
        rest = more;
    }
    resolve(files, &module, rest, reexports.checked_sub(1)?).or(Some(module))
}

/// Returns the largest set of files that all reach each other.
fn largest_circle(files: &SourceFiles) -> Vec<&ModulePath> {
    let uses: BTreeMap<&ModulePath, BTreeSet<ModulePath>> = files
        .iter()
        .map(|(module, file)| {
            let used = file.used.iter().filter_map(|path| resolve(files, module, path, MOST_REEXPORTS));
            (module, used.filter(|used| used != module && files.contains_key(used)).collect())
        })
        .collect();
    let reach = |from: &ModulePath| {
        let (mut seen, mut next) = (BTreeSet::new(), vec![from.clone()]);
        while let Some(module) = next.pop() {
            next.extend(uses[&module].iter().filter(|used| seen.insert((*used).clone())).cloned());
        }
        seen
    };
    let reached: BTreeMap<&ModulePath, BTreeSet<ModulePath>> =
        files.keys().map(|module| (module, reach(module))).collect();
    let circles = files.keys().map(|module| -> Vec<&ModulePath> {
        let is_in =
            |other: &&ModulePath| reached[*other].contains(module) && reached[module].contains(*other);
        files.keys().filter(is_in).collect()
    });
    circles.max_by_key(Vec::len).unwrap_or_default()
}
