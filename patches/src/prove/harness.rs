//! Puts the program of a set's conformance together: ours, the tree's own code, the sidecars as they are written for the tree,
//! and ours again.

use std::fmt::Write as _;

use crate::error::Result;
use crate::judgement::Edits;
use crate::scan::{Finding, Source};
use crate::set::PatchSet;
use crate::set::conformance::{Conformance, Part};
use crate::tree::Tree;

/// Files of a program, all in one folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Harness {
    /// Name and content.
    pub files: Vec<(String, Vec<u8>)>,
    /// The one that is compiled.
    pub main: String,
    /// The tree's code in it, one line each: what, and where it was found.
    pub parts: Vec<String>,
    /// What the tree lacks that the program needs; then there is no program.
    pub missing: Vec<String>,
}

/// The name of the file that is compiled.
const MAIN: &str = "tree.cpp";

/// The program for a tree that a set was judged in; `None` if the set has no such program.
///
/// # Errors
///
/// A file of the tree is there and cannot be read.
pub fn harness(set: &PatchSet, edits: &Edits, tree: &dyn Tree) -> Result<Option<Harness>> {
    let Some(conformance) = &set.conformance else { return Ok(None) };
    let mut made = Harness {
        files: vec![
            (name_of(&conformance.before).to_owned(), conformance.before_text.clone()),
            (name_of(&conformance.program).to_owned(), conformance.program_text.clone()),
        ],
        main: MAIN.to_owned(),
        parts: Vec::new(),
        missing: Vec::new(),
    };
    let mut text = format!("#include \"{}\"\n", name_of(&conformance.before));
    for part in &conformance.parts {
        match code_of(part, tree)? {
            Code::Found(place, code) => {
                made.parts.push(place);
                match &part.under {
                    Some(under) => {
                        let _infallible = writeln!(text, "#if defined({under})\n{code}\n#endif");
                    }
                    None => text.extend([code.as_str(), "\n"]),
                }
            }
            Code::Missing(_) if part.optional => {}
            Code::Missing(what) => made.missing.push(what),
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
    // The first one includes the others where it needs them.
    if let Some(sidecar) = set.sidecars.first() {
        let _infallible = writeln!(text, "#include \"{}\"", sidecar.file);
    }
    let _infallible = writeln!(text, "#include \"{}\"", name_of(&conformance.program));
    made.files.push((MAIN.to_owned(), text.into_bytes()));
    Ok(Some(made))
}

impl Conformance {
    /// The ways in which the tree is compiled, at least one.
    pub fn ways(&self) -> Vec<Vec<String>> {
        if self.flags.is_empty() { vec![Vec::new()] } else { self.flags.clone() }
    }
}

fn name_of(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

enum Code {
    /// What and where, and its text.
    Found(String, String),
    /// What is missing, or why it cannot be told.
    Missing(String),
}

fn code_of(part: &Part, tree: &dyn Tree) -> Result<Code> {
    let what = match (&part.container, &part.lines) {
        (Some(container), _) => container.to_string(),
        (None, Some(lines)) => format!("a line like `{lines}`"),
        (None, None) => String::new(),
    };
    for file in &part.files {
        let Some(raw) = tree.read(file)? else { continue };
        let source = Source::new(raw);
        if let Some(container) = &part.container {
            match source.find(container) {
                Finding::All(found) if found.is_empty() => continue,
                Finding::All(found) => {
                    let mut code = String::new();
                    for one in &found {
                        let own = source.raw().get(one.start..one.end).unwrap_or_default();
                        // A struct ends with a semicolon; behind a function one more does no harm.
                        code.extend([&*String::from_utf8_lossy(own), ";\n"]);
                    }
                    let line = found.first().map_or(0, |one| source.line(one.start));
                    return Ok(Code::Found(format!("{what}, {file}:{line}"), code));
                }
                Finding::Unsure { line, why } => {
                    return Ok(Code::Missing(format!("{file}:{line}: {what}: {why}")));
                }
            }
        }
        if let Some(lines) = &part.lines {
            let found: Vec<&str> = lines.0.find_iter(source.code()).map(|found| found.as_str()).collect();
            if !found.is_empty() {
                return Ok(Code::Found(format!("{}, {file}", found.join(" ")), found.join("\n")));
            }
        }
    }
    Ok(Code::Missing(format!("{what} is in none of {}", part.files.join(", "))))
}
