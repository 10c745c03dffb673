//! Checks names, paths and ids.

use std::collections::BTreeSet;

use super::SetCheckResult;
use crate::scan::CodeContainer;
use crate::set::load::position::ValuePath;

const BACKEND_NAMES: [&str; 11] =
    ["blas", "cann", "cpu", "cuda", "hip", "metal", "musa", "opencl", "rpc", "sycl", "vulkan"];

pub(super) fn check_files(files: &[String], at: &ValuePath) -> SetCheckResult {
    let at = at.key("files");
    if files.is_empty() {
        return at.fault("name at least one file");
    }
    match files.iter().enumerate().find(|(_, file)| !is_inside(file)) {
        None => Ok(()),
        Some((number, file)) => at
            .item(number)
            .fault(format!("`{file}` is not a path below llama.cpp's root, such as ggml/src/ggml.c")),
    }
}

/// Returns true for a path relative to a tree's root that does not lead out of it.
pub(super) fn is_inside(path: &str) -> bool {
    !path.contains(['\\', '\0', ':'])
        && path.split('/').all(|part| !matches!(part, "" | "." | "..") && !part.eq_ignore_ascii_case(".git"))
}

pub(super) fn check_container(container: &CodeContainer, at: &ValuePath) -> SetCheckResult {
    let good = container.name.split("::").all(|part| {
        let part = part.strip_prefix('~').unwrap_or(part);
        part.starts_with("operator")
            || (is_word(part) && part.starts_with(|sign: char| !sign.is_ascii_digit()))
    });
    if good && container.name.is_ascii() {
        return Ok(());
    }
    let why = format!("`{}` is not a name such as f, a::b or a::~a", container.name);
    at.key("container").key("name").fault(why)
}

pub(super) fn is_word(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
}

/// Returns true for the name of a macro or an environment variable: `[A-Z][A-Z0-9_]*`.
pub(super) fn is_constant_name(name: &str) -> bool {
    name.starts_with(|sign: char| sign.is_ascii_uppercase())
        && name.bytes().all(|byte| byte.is_ascii_uppercase() || byte.is_ascii_digit() || byte == b'_')
}

pub(super) fn check_file_name(name: &str, at: &ValuePath) -> SetCheckResult {
    let good = name.starts_with(|sign: char| sign.is_ascii_alphanumeric())
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte));
    if good { Ok(()) } else { at.fault(format!("`{name}` is not the name of a file in the set's folder")) }
}

pub(super) fn check_id(id: &str, at: &ValuePath) -> SetCheckResult {
    check_word(id, "-", at)
}

/// Checks an id of lower-case letters, digits and the characters in `also`, which is `-` or `-_`.
pub(super) fn check_word(id: &str, also: &str, at: &ValuePath) -> SetCheckResult {
    let is_allowed = |sign: char| sign.is_ascii_lowercase() || sign.is_ascii_digit() || also.contains(sign);
    if !id.is_empty() && id.chars().all(is_allowed) {
        return Ok(());
    }
    let signs = if also == "-" { "-" } else { "- _" };
    at.fault(format!("`{id}` is not an id: lower-case letters, digits and {signs}"))
}

pub(super) fn check_not_empty(text: &str, at: &ValuePath) -> SetCheckResult {
    if text.trim().is_empty() { at.fault("this says nothing") } else { Ok(()) }
}

pub(super) fn check_backends(names: &[String], at: &ValuePath) -> SetCheckResult {
    match names.iter().enumerate().find(|(_, name)| !BACKEND_NAMES.contains(&name.as_str())) {
        None => Ok(()),
        Some((number, name)) => at
            .item(number)
            .fault(format!("`{name}` is not a backend; there are {}", BACKEND_NAMES.join(", "))),
    }
}

pub(super) fn check_build(text: &str, at: &ValuePath) -> SetCheckResult {
    let good = text.strip_prefix('b').is_some_and(|number| {
        (1..=9).contains(&number.len()) && number.bytes().all(|byte| byte.is_ascii_digit())
    });
    if good { Ok(()) } else { at.fault(format!("`{text}` is not a build such as b4881")) }
}

pub(super) fn check_builds(first: &str, last: &str, at: &ValuePath) -> SetCheckResult {
    for (key, bound) in [("first", first), ("last", last)] {
        if !bound.is_empty() {
            check_build(bound, &at.key(key))?;
        }
    }
    Ok(())
}

/// Checks that the ids in an array of tables differ. `of`: the key of the id.
pub(super) fn check_unique<'a>(
    key: &'static str,
    of: &'static str,
    ids: impl Iterator<Item = &'a str>,
    at: &ValuePath,
) -> SetCheckResult {
    let mut seen = BTreeSet::new();
    for (number, id) in ids.enumerate() {
        if !seen.insert(id) {
            return at.element(key, number).key(of).fault(format!("there is another {key} `{id}`"));
        }
    }
    Ok(())
}
