//! Parses ninja's progress lines, such as `[12/206] Building CXX object
//! src/CMakeFiles/llama.dir/llama.cpp.o`.

/// `NINJA_STATUS`: the prefix of ninja's progress lines.
pub(super) const STATUS_FORMAT: &str = "[%f/%t] ";

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct NinjaStep {
    pub(super) done: u32,
    pub(super) total: u32,
    /// The file that was made, without its folder.
    pub(super) item: String,
}

/// Parses a progress line; `None` for other lines.
pub(super) fn parse_step(line: &str) -> Option<NinjaStep> {
    let (counts, what) = line.strip_prefix('[')?.split_once("] ")?;
    let (done, total) = counts.split_once('/')?;
    let (done, total) = (done.trim().parse().ok()?, total.trim().parse().ok()?);
    let last = what.split_whitespace().next_back().unwrap_or_default();
    let name = last.rsplit('/').next().unwrap_or(last);
    let item = name.strip_suffix(".o").unwrap_or(name).to_owned();
    (done <= total).then_some(NinjaStep { done, total, item })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_tells_counts_and_the_file() {
        let found =
            parse_step("[12/206] Building CXX object src/CMakeFiles/llama.dir/llama-arch.cpp.o").unwrap();
        assert_eq!(found, NinjaStep { done: 12, total: 206, item: "llama-arch.cpp".into() });
        assert_eq!(
            parse_step("[206/206] Linking CXX executable bin/llama-server").unwrap().item,
            "llama-server"
        );
    }

    #[test]
    fn other_lines_are_no_steps() {
        for line in ["", "[]", "[1/2]", "[x/y] z", "[3/2] z", "src/a.cpp:1:2: error: no", "[info] hello"] {
            assert_eq!(parse_step(line), None, "{line}");
        }
    }
}
