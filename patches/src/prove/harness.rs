//! Assembles the conformance program of a set: our code, the tree's own code, the sidecars as written for
//! the tree, and our code again.

use std::fmt::Write as _;

use crate::edits::TreeEdits;
use crate::error::Result;
use crate::scan::{ContainerSearch, ScannedSource};
use crate::set::PatchSet;
use crate::set::conformance::{ConformancePart, ConformanceSpec};
use crate::tree::SourceTree;

/// Files of a program in one folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConformanceProgram {
    /// Names and contents.
    pub files: Vec<(String, Vec<u8>)>,
    /// Name of the compiled file.
    pub main: String,
    /// Included code of the tree, one line each with its location.
    pub parts: Vec<String>,
    /// Code that the program needs and the tree lacks; then there is no program.
    pub missing: Vec<String>,
}

const MAIN_FILE: &str = "tree.cpp";

/// The program for a judged tree; `None` if the set has none.
///
/// # Errors
/// Fails if an existing file of the tree cannot be read.
pub fn assemble_program(
    set: &PatchSet,
    edits: &TreeEdits,
    tree: &dyn SourceTree,
) -> Result<Option<ConformanceProgram>> {
    let Some(conformance) = &set.conformance else { return Ok(None) };
    let mut made = ConformanceProgram {
        files: vec![
            (file_name(&conformance.before).to_owned(), conformance.before_text.clone()),
            (file_name(&conformance.program).to_owned(), conformance.program_text.clone()),
        ],
        main: MAIN_FILE.to_owned(),
        parts: Vec::new(),
        missing: Vec::new(),
    };
    let mut text = format!("#include \"{}\"\n", file_name(&conformance.before));
    for part in &conformance.parts {
        match find_code(part, tree)? {
            TreeCode::Found(place, code) => {
                made.parts.push(place);
                match &part.under {
                    Some(under) => {
                        let _infallible = writeln!(text, "#if defined({under})\n{code}\n#endif");
                    }
                    None => text.extend([code.as_str(), "\n"]),
                }
            }
            TreeCode::Missing(_) if part.optional => {}
            TreeCode::Missing(what) => made.missing.push(what),
        }
    }
    for sidecar in &set.sidecars {
        let written = edits.0.iter().find(|edit| {
            edit.before.is_none() && edit.path.rsplit('/').next() == Some(sidecar.file.as_str())
        });
        if let Some(edit) = written {
            made.files.push((sidecar.file.clone(), edit.after.clone()));
        }
    }
    // The first sidecar includes the others where it needs them.
    if let Some(sidecar) = set.sidecars.first() {
        let _infallible = writeln!(text, "#include \"{}\"", sidecar.file);
    }
    let _infallible = writeln!(text, "#include \"{}\"", file_name(&conformance.program));
    made.files.push((MAIN_FILE.to_owned(), text.into_bytes()));
    Ok(Some(made))
}

impl ConformanceSpec {
    /// Compiler flags of each compiled variant, at least one.
    pub fn variants(&self) -> Vec<Vec<String>> {
        if self.flags.is_empty() { vec![Vec::new()] } else { self.flags.clone() }
    }
}

fn file_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

enum TreeCode {
    /// Description with location, and text.
    Found(String, String),
    /// Missing code, or why its presence is uncertain.
    Missing(String),
}

fn find_code(part: &ConformancePart, tree: &dyn SourceTree) -> Result<TreeCode> {
    let what = match (&part.container, &part.lines) {
        (Some(container), _) => container.to_string(),
        (None, Some(lines)) => format!("a line like `{lines}`"),
        (None, None) => String::new(),
    };
    for file in &part.files {
        let Some(raw) = tree.read(file)? else { continue };
        let source = ScannedSource::new(raw);
        if let Some(container) = &part.container {
            match source.find(container) {
                ContainerSearch::All(found) if found.is_empty() => continue,
                ContainerSearch::All(found) => {
                    let mut code = String::new();
                    for one in &found {
                        let own = source.raw().get(one.start..one.end).unwrap_or_default();
                        // A struct ends with a semicolon; after a function, an extra one is harmless.
                        code.extend([&*String::from_utf8_lossy(own), ";\n"]);
                    }
                    let line = found.first().map_or(0, |one| source.line(one.start));
                    return Ok(TreeCode::Found(format!("{what}, {file}:{line}"), code));
                }
                ContainerSearch::Unsure { line, why } => {
                    return Ok(TreeCode::Missing(format!("{file}:{line}: {what}: {why}")));
                }
            }
        }
        if let Some(lines) = &part.lines {
            let found: Vec<&str> = lines.0.find_iter(source.code()).map(|found| found.as_str()).collect();
            if !found.is_empty() {
                return Ok(TreeCode::Found(format!("{}, {file}", found.join(" ")), found.join("\n")));
            }
        }
    }
    Ok(TreeCode::Missing(format!("{what} is in none of {}", part.files.join(", "))))
}
