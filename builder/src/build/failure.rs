//! Finds the error that matters in the output of cmake or of compilers: the first one, with the lines that explain
//! it.

/// Lines shown after the first of an error.
const CONTEXT: usize = 5;
/// Longest line that is shown: command lines of compilers fill screens.
const LONGEST: usize = 300;

/// Kinds of first lines, the most telling kind first.
const KINDS: [fn(&str) -> bool; 4] = [
    |line| {
        line.contains(" error: ") || line.starts_with("error: ") || line.contains("undefined reference to")
    },
    |line| line.starts_with("CMake Error"),
    |line| line.starts_with("ninja: error:"),
    |line| line.starts_with("FAILED:"),
];

/// The first error with some lines, or else the last lines of the output.
pub(super) fn excerpt(log: &str) -> String {
    let lines: Vec<&str> = log.lines().collect();
    let first = KINDS.iter().find_map(|kind| lines.iter().position(|line| kind(line)));
    let begin = first.unwrap_or_else(|| lines.len().saturating_sub(CONTEXT + 1));
    let shown = lines.iter().skip(begin).take(CONTEXT + 1);
    let text: Vec<String> = shown.map(|line| shorten(line)).collect();
    text.join("\n").trim_end().to_owned()
}

/// Whether a compiler was killed from outside, which is what the kernel does when memory runs out.
pub(super) fn was_killed(log: &str) -> bool {
    // As gcc and clang say it for their own children, and as a shell says it.
    [
        "Killed signal terminated program",
        "due to signal 9",
        "unable to execute command: Killed",
        "internal compiler error: Killed",
    ]
    .iter()
    .any(|sign| log.contains(sign))
        || log.lines().any(|line| line == "Killed")
}

fn shorten(line: &str) -> String {
    match line.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}…", &line[..end]),
        None => line.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COMPILE: &str = "\
[3/9] Building CXX object a.cpp.o
[4/9] Building CXX object b.cpp.o
FAILED: b.cpp.o
/usr/bin/c++ -O3 -c b.cpp
../src/b.cpp: In function 'int main()':
../src/b.cpp:3:5: error: 'y' was not declared in this scope
    3 |     y = 1;
      |     ^
../src/b.cpp:4:5: error: another
ninja: build stopped: subcommand failed.";

    #[test]
    fn the_first_compiler_error_is_shown_and_not_the_command() {
        let shown = excerpt(COMPILE);
        assert!(shown.starts_with("../src/b.cpp:3:5: error: 'y' was not declared"), "{shown}");
        assert!(shown.lines().count() <= CONTEXT + 1);
    }

    #[test]
    fn an_error_of_cmake_is_shown_with_its_text() {
        let log = "-- ok\nCMake Error at CMakeLists.txt:3 (find_package):\n  Could not find X\n\n-- Configuring incomplete";
        assert!(
            excerpt(log).starts_with("CMake Error at CMakeLists.txt:3 (find_package):\n  Could not find X")
        );
    }

    #[test]
    fn without_a_known_error_the_last_lines_are_shown() {
        let log = (0..20).map(|number| number.to_string()).collect::<Vec<_>>().join("\n");
        assert_eq!(excerpt(&log), "14\n15\n16\n17\n18\n19");
        assert_eq!(excerpt(""), "");
    }

    #[test]
    fn a_killed_compiler_is_recognised() {
        assert!(was_killed(
            "c++: fatal error: Killed signal terminated program cc1plus\ncompilation terminated."
        ));
        assert!(!was_killed(COMPILE));
    }

    #[test]
    fn endless_lines_are_cut() {
        assert!(excerpt(&format!("x.c:1:1: error: {}", "ä".repeat(1000))).chars().count() == LONGEST + 1);
    }
}
