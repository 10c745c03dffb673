//! Finds the error that matters in the output of cmake or compilers: the first one, with the lines that
//! explain it.

const ERROR_CONTEXT_LINES: usize = 5;
/// Longest line shown, in characters: compiler command lines would fill the screen.
const MAX_LINE_CHARS: usize = 300;

/// Patterns of an error's first line. Patterns of root causes come first.
const ERROR_PATTERNS: [fn(&str) -> bool; 5] = [
    // Disk or memory ran out: other errors follow from this one.
    reports_exhaustion,
    |line| {
        line.contains(" error: ") || line.starts_with("error: ") || line.contains("undefined reference to")
    },
    |line| line.starts_with("CMake Error"),
    |line| line.starts_with("ninja: error:"),
    |line| line.starts_with("FAILED:"),
];

/// Returns the first error with a few lines after it; without a known error, the last lines of the output.
pub(super) fn excerpt(log: &str) -> String {
    let lines: Vec<&str> = log.lines().collect();
    let first = ERROR_PATTERNS.iter().find_map(|kind| lines.iter().position(|line| kind(line)));
    let begin = first.unwrap_or_else(|| lines.len().saturating_sub(ERROR_CONTEXT_LINES + 1));
    let shown = lines.iter().skip(begin).take(ERROR_CONTEXT_LINES + 1);
    let text: Vec<String> = shown.map(|line| shorten(line)).collect();
    text.join("\n").trim_end().to_owned()
}

/// Returns true if a compiler or linker was killed from outside; the kernel does so when memory runs out.
pub(super) fn was_killed(log: &str) -> bool {
    // Wordings of gcc, clang and nvcc for a killed child process, and wordings of shells.
    [
        "Killed signal terminated program",
        "terminated with signal 9",
        "due to signal 9",
        "unable to execute command: Killed",
        "internal compiler error: Killed",
    ]
    .iter()
    .any(|sign| log.contains(sign))
        || log.lines().any(|line| line == "Killed")
}

/// Searches the whole output: a compiler prints its last message after those of the linker that it called.
pub(super) fn ran_out_of_space(log: &str) -> bool {
    was_killed(log) || log.lines().any(reports_exhaustion)
}

fn reports_exhaustion(line: &str) -> bool {
    !is_quoted_source(line) && mentions_exhaustion(line)
}

pub(crate) fn mentions_exhaustion(text: &str) -> bool {
    [
        "No space left on device",
        "Disk quota exceeded",
        "Cannot allocate memory",
        // From linkers; older compilers say `virtual memory exhausted`.
        "memory exhausted",
        "out of memory allocating",
        "LLVM ERROR: out of memory",
        "std::bad_alloc",
        // From fork: no new process is possible.
        "Resource temporarily unavailable",
    ]
    .iter()
    .any(|words| text.contains(words))
}

/// Returns true for a source line quoted by a compiler, such as `   12 | code`: its text is no error message.
fn is_quoted_source(line: &str) -> bool {
    let (number, _) = line.split_once('|').unwrap_or(("-", ""));
    number.trim().bytes().all(|byte| byte.is_ascii_digit())
}

fn shorten(line: &str) -> String {
    match line.char_indices().nth(MAX_LINE_CHARS) {
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
        assert!(shown.lines().count() <= ERROR_CONTEXT_LINES + 1);
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
        assert!(was_killed("collect2: fatal error: ld terminated with signal 9 [Killed]"));
        assert!(!was_killed(COMPILE));
    }

    #[test]
    fn a_disk_that_is_full_when_it_is_linked_is_recognised_and_shown() {
        let log = "[9/9] Linking CXX executable bin/llama-server\nFAILED: bin/llama-server\n\
                   /usr/bin/ld: final link failed: No space left on device\n\
                   collect2: error: ld returned 1 exit status\nninja: build stopped: subcommand failed.";
        assert!(excerpt(log).starts_with("/usr/bin/ld: final link failed: No space"), "{}", excerpt(log));
        assert!(ran_out_of_space(log));
        assert!(ran_out_of_space(&log.replace("No space left on device", "memory exhausted")));
    }

    #[test]
    fn whatever_ran_out_is_recognised_and_no_error_in_the_source_is_taken_for_it() {
        for line in [
            "as: a.o: Disk quota exceeded",
            "cc1plus: out of memory allocating 65536 bytes after a total of 1048576 bytes",
            "virtual memory exhausted: Cannot allocate memory",
            "terminate called after throwing an instance of 'std::bad_alloc'",
            "c++: fatal error: cannot execute 'cc1plus': vfork: Resource temporarily unavailable",
            "Killed",
        ] {
            assert!(ran_out_of_space(&format!("[1/2] a.o\n{line}\nninja: build stopped")), "{line}");
        }
        assert!(!ran_out_of_space(COMPILE));
        let quoted =
            "a.cpp:3:5: error: expected ';'\n    3 |     } catch (const std::bad_alloc &) {\n      |     ^";
        assert!(!ran_out_of_space(quoted));
    }

    #[test]
    fn endless_lines_are_cut() {
        assert_eq!(
            excerpt(&format!("x.c:1:1: error: {}", "ä".repeat(1000))).chars().count(),
            MAX_LINE_CHARS + 1
        );
    }
}
