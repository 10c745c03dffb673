//! Writes the files of `diagnose`: the mitigations into the configuration, the page, the folder. All paths
//! are checked before the experiment starts. A failed write does not prevent the others.

use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;

use super::DiagnoseArgs;
use crate::exit::CommandError;

/// Checks that all outputs can be written, before the experiment starts.
pub(super) fn check_outputs(args: &DiagnoseArgs) -> Result<(), CommandError> {
    if let Some(path) = &args.html {
        let opened = std::fs::OpenOptions::new().append(true).create(true).open(path);
        opened.map_err(|error| {
            CommandError::usage(
                format!("--html {}: {error}", path.display()),
                "choose a file that can be written",
            )
        })?;
    }
    if let Some(path) = &args.report {
        if let Some(file) = warden_diagnose::report::foreign_file_in(path, true) {
            return Err(CommandError::usage(
                format!(
                    "--report {}: {} is there, and llama-warden did not write it",
                    path.display(),
                    file.display()
                ),
                "choose a folder of its own for the report",
            ));
        }
        // Make the folder private at first: a report contains server log lines and requests.
        let made = DirBuilder::new().recursive(true).mode(0o700).create(path);
        let tried = made.and_then(|()| tempfile::tempfile_in(path));
        tried.map_err(|error| {
            CommandError::usage(
                format!("--report {}: {error}", path.display()),
                "choose a folder that can be written",
            )
        })?;
    }
    Ok(())
}

pub(super) fn write_page(path: &Path, page: &str) -> Result<(), CommandError> {
    std::fs::write(path, page)
        .map_err(|error| CommandError::failed(format!("cannot write {}: {error}", path.display())))
}

/// Returns the first failure of all results. Reports each later one as a line through `tell`.
pub(super) fn first_failure(
    all: impl IntoIterator<Item = Result<(), CommandError>>,
    mut tell: impl FnMut(&str),
) -> Result<(), CommandError> {
    let mut first = Ok(());
    for failure in all.into_iter().filter_map(Result::err) {
        if first.is_ok() {
            first = Err(failure);
        } else {
            failure.lines().iter().for_each(|line| tell(line));
        }
    }
    first
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct OutputsTestCli {
        #[command(flatten)]
        args: DiagnoseArgs,
    }

    #[test]
    fn a_place_that_cannot_be_written_is_told_before_the_work() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        std::fs::write(&file, "mine").unwrap();
        let prepared = |flag: &str, path: &Path| {
            check_outputs(
                &OutputsTestCli::parse_from(["diagnose", flag, path.to_str().unwrap(), "--", "-m", "a"]).args,
            )
        };
        for (flag, path) in
            [("--report", file.join("in")), ("--report", file.clone()), ("--html", file.join("x"))]
        {
            let failure = prepared(flag, &path).unwrap_err();
            assert!(failure.code() == 2 && failure.to_string().starts_with(flag), "{failure}");
        }
        let new = folder.path().join("a/b");
        prepared("--report", &new).unwrap();
        assert_eq!(std::fs::read_dir(&new).unwrap().count(), 0);
        for name in ["report.md", "findings.json", "requests/0.json"] {
            let own = folder.path().join("theirs");
            let theirs = own.join(name);
            std::fs::create_dir_all(theirs.parent().unwrap()).unwrap();
            std::fs::write(&theirs, "mine").unwrap();
            let failure = prepared("--report", &own).unwrap_err();
            assert!(failure.to_string().contains(name), "{failure}");
            std::fs::remove_file(&theirs).unwrap();
        }
        prepared("--html", &file).unwrap();
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "mine");
    }

    #[test]
    fn the_first_failure_is_the_result_and_the_others_are_told() {
        let mut told = Vec::new();
        let all =
            [Ok(()), Err(CommandError::usage("one", "x")), Ok(()), Err(CommandError::hinted("two", "y"))];
        let failure = first_failure(all, |line| told.push(line.to_owned())).unwrap_err();
        assert_eq!((failure.to_string().as_str(), failure.code()), ("one", 2));
        assert_eq!(told, ["error: two", "hint: y"]);
        assert!(first_failure([Ok(())], |_| ()).is_ok());
    }
}
