//! Small text files of the kernel.

use std::path::Path;

pub(crate) fn read_number(path: &Path) -> Option<u64> {
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

pub(crate) fn field<'a>(text: &'a str, name: &str, separator: char) -> Option<&'a str> {
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(separator)).map(str::trim)
}

pub(crate) fn number_field(text: &str, name: &str) -> Option<u64> {
    field(text, name, ' ')?.parse().ok()
}
