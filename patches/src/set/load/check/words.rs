//! Checks names, paths and ids.

use std::collections::BTreeSet;

use super::SetCheckResult;
use crate::scan::CodeContainer;
use crate::set::load::position::PathStep::{self, Item, Key};

/// Names of backends, as in ggml's cmake options.
const BACKEND_NAMES: [&str; 11] =
    ["blas", "cann", "cpu", "cuda", "hip", "metal", "musa", "opencl", "rpc", "sycl", "vulkan"];

pub(super) fn check_files(files: &[String], at: &[PathStep]) -> SetCheckResult {
    let at = extend_path(at, &[Key("files")]);
    if files.is_empty() {
        return check_error(&at, "name at least one file".to_owned());
    }
    for (number, file) in files.iter().enumerate() {
        if !is_inside(file) {
            return check_error(
                &extend_path(&at, &[Item(number)]),
                format!("`{file}` is not a path below llama.cpp's root, such as ggml/src/ggml.c"),
            );
        }
    }
    Ok(())
}

/// Returns true for a path relative to a tree's root that does not lead out of it.
pub(super) fn is_inside(path: &str) -> bool {
    !path.contains(['\\', '\0', ':'])
        && path.split('/').all(|part| !matches!(part, "" | "." | "..") && !part.eq_ignore_ascii_case(".git"))
}

pub(super) fn check_container(container: &CodeContainer, at: &[PathStep]) -> SetCheckResult {
    let good = container.name.split("::").all(|part| {
        let part = part.strip_prefix('~').unwrap_or(part);
        let word = |text: &str| text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
        part.starts_with("operator") || (word(part) && part.starts_with(|sign: char| !sign.is_ascii_digit()))
    });
    if good && container.name.is_ascii() {
        return Ok(());
    }
    check_error(
        &extend_path(at, &[Key("container"), Key("name")]),
        format!("`{}` is not a name such as f, a::b or a::~a", container.name),
    )
}

pub(super) fn check_file_name(name: &str, at: &[PathStep]) -> SetCheckResult {
    let good = name.starts_with(|sign: char| sign.is_ascii_alphanumeric())
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte));
    if good {
        Ok(())
    } else {
        check_error(at, format!("`{name}` is not the name of a file in the set's folder"))
    }
}

pub(super) fn check_id(id: &str, at: &[PathStep]) -> SetCheckResult {
    check_word(id, "-", at)
}

pub(super) fn check_word(id: &str, also: &str, at: &[PathStep]) -> SetCheckResult {
    let good = !id.is_empty()
        && id.bytes().all(|byte| {
            byte.is_ascii_lowercase() || byte.is_ascii_digit() || also.as_bytes().contains(&byte)
        });
    if good {
        return Ok(());
    }
    check_error(
        at,
        format!(
            "`{id}` is not an id: lower-case letters, digits and {}",
            if also == "-" { "-" } else { "- _" }
        ),
    )
}

pub(super) fn check_not_empty(text: &str, at: &[PathStep]) -> SetCheckResult {
    if text.trim().is_empty() { check_error(at, "this says nothing".to_owned()) } else { Ok(()) }
}

pub(super) fn check_backends(names: &[String], at: &[PathStep]) -> SetCheckResult {
    for (number, name) in names.iter().enumerate() {
        if !BACKEND_NAMES.contains(&name.as_str()) {
            return check_error(
                &extend_path(at, &[Item(number)]),
                format!("`{name}` is not a backend; there are {}", BACKEND_NAMES.join(", ")),
            );
        }
    }
    Ok(())
}

pub(super) fn check_build(text: &str, at: &[PathStep]) -> SetCheckResult {
    let good = text.strip_prefix('b').is_some_and(|number| {
        (1..=9).contains(&number.len()) && number.bytes().all(|byte| byte.is_ascii_digit())
    });
    if good { Ok(()) } else { check_error(at, format!("`{text}` is not a build such as b4881")) }
}

pub(super) fn check_unique<'a>(
    key: &'static str,
    of: &'static str,
    ids: impl Iterator<Item = &'a str>,
) -> SetCheckResult {
    let mut seen = BTreeSet::new();
    for (number, id) in ids.enumerate() {
        if !seen.insert(id) {
            return check_error(&[Key(key), Item(number), Key(of)], format!("there is another {key} `{id}`"));
        }
    }
    Ok(())
}

pub(super) fn extend_path(at: &[PathStep], more: &[PathStep]) -> Vec<PathStep> {
    [at, more].concat()
}

pub(super) fn check_error(at: &[PathStep], why: String) -> SetCheckResult {
    Err((at.to_vec(), why))
}
