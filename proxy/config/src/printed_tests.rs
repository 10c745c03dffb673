//! Compares tables in documentation pages with the generated text, for tests of this crate and of the program.
//! Each table stands between its own mark and [`TABLE_END_MARK`]. With `WARDEN_RENEW_DOCS=1`, replaces the
//! tables.

use std::path::Path;

pub(crate) const TABLE_END_MARK: &str = "<!-- end -->\n";

/// Replaces tables in a page. Each table is given with its start mark, and its text includes both marks.
/// Fails if a mark is missing.
pub(crate) fn replace_tables(
    page: &str,
    tables: impl IntoIterator<Item = (String, String)>,
) -> Result<String, String> {
    let mut page = page.to_owned();
    for (start, table) in tables {
        let shown = start.trim();
        let (before, rest) = page.split_once(&start).ok_or_else(|| format!("there is no `{shown}`"))?;
        let (_, after) = rest
            .split_once(TABLE_END_MARK)
            .ok_or_else(|| format!("the table behind `{shown}` has no end"))?;
        page = format!("{before}{table}{after}");
    }
    Ok(page)
}

/// Compares the page `docs/NAME` with the generated tables; with `WARDEN_RENEW_DOCS`, replaces the tables.
/// The error quotes the first differing line.
pub(crate) fn check_page(
    name: &str,
    tables: impl IntoIterator<Item = (String, String)>,
) -> Result<(), String> {
    let path = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs")).join(name);
    let page = std::fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    let renewed = replace_tables(&page, tables)?;
    if std::env::var_os("WARDEN_RENEW_DOCS").is_some() {
        return std::fs::write(&path, &renewed).map_err(|error| format!("{}: {error}", path.display()));
    }
    if page == renewed {
        return Ok(());
    }
    let differ = page.lines().zip(renewed.lines()).find(|(is, printed)| is != printed);
    Err(format!("WARDEN_RENEW_DOCS=1 renews docs/{name}; it differs first in {differ:#?}"))
}
