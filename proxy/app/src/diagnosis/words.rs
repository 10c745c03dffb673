//! The command line of a diagnosis, and what its exit code means. Pure.

use std::path::Path;

use warden_policies::experiment::Workload;
use warden_supervisor::Exit;

use crate::config::source::tree::Kind;
use crate::exit;
use crate::serve::Plan;

/// Work that can be chosen: without a recording, of which only a terminal knows.
pub(crate) const WORKLOADS: [Workload; 10] = [
    Workload::ShortText,
    Workload::LongText,
    Workload::OutputLengths,
    Workload::DistinctPrompts,
    Workload::Conversation,
    Workload::PrefillSweep,
    Workload::SameImage,
    Workload::ImageSizes,
    Workload::Audio,
    Workload::Embeddings,
];

/// Which work somebody asks for; `None`: everything, for which there is no word.
///
/// # Errors
/// The word, if it is none of those that can be chosen.
pub(crate) fn workload(word: &str) -> Result<Option<Workload>, &str> {
    if word.is_empty() {
        return Ok(None);
    }
    word.parse().ok().filter(|one| WORKLOADS.contains(one)).map(Some).ok_or(word)
}

/// The words that told this instance what to serve, as far as `diagnose` needs them, too.
#[derive(Clone, Debug, Default)]
pub(crate) struct Words {
    config: Vec<String>,
    /// llama-server's own flags, where there is no file.
    flags: Vec<String>,
}

impl Words {
    /// Those of a plan.
    pub(crate) fn of(plan: &Plan) -> Self {
        let mut config = crate::cli::update::config_words(&plan.config);
        // What the command line says of programs comes before the file.
        for flag in &plan.flags {
            let path: Vec<&str> = flag.path.iter().map(String::as_str).collect();
            match (&path[..], &flag.value.kind) {
                ([table, key @ ("binary" | "build")], Kind::Raw(value)) => {
                    config.extend(["--set".to_owned(), format!("{table}.{key}={value}")]);
                }
                (["paths", "models"], Kind::List(folders)) => {
                    let named = folders.iter().filter_map(|folder| match &folder.kind {
                        Kind::Text(folder) => Some(format!("--models-dir={folder}")),
                        _ => None,
                    });
                    config.extend(named);
                }
                _ => {}
            }
        }
        Self { config, flags: plan.server_flags.clone() }
    }

    /// All of them.
    pub(crate) fn all(&self, model: &str, workload: Option<Workload>, report: &Path) -> Vec<String> {
        let mut words = vec!["diagnose".to_owned()];
        words.extend(self.config.iter().cloned());
        words.extend(["--html".to_owned(), report.to_string_lossy().into_owned()]);
        if let Some(workload) = workload {
            words.extend(["--workload".to_owned(), workload.to_string()]);
        }
        if self.flags.is_empty() {
            // Behind an equals sign, because a name may begin with a hyphen.
            words.push(format!("--model={model}"));
        } else {
            words.push("--".to_owned());
            words.extend(self.flags.iter().cloned());
        }
        words
    }
}

/// What came of it, and whether it is a finding; `last` is what it said last.
pub(crate) fn outcome(ended: Exit, last: Option<&str>) -> (bool, String) {
    let code = match ended {
        Exit::Code(code) => u8::try_from(code).ok(),
        Exit::Signal(_) | Exit::Unknown => None,
    };
    let found = match code {
        Some(0) => "no leak was found",
        Some(exit::LEAKS) => "a leak was found",
        Some(exit::CRASHES) => "the server crashed",
        Some(exit::TOO_FEW) => "there were too few readings to tell",
        Some(exit::INTERRUPTED) => "it was interrupted",
        _ => {
            let last = last.map_or_else(String::new, |last| format!(": {last}"));
            return (false, format!("it failed ({ended}){last}"));
        }
    };
    (code != Some(exit::INTERRUPTED), found.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_work_that_needs_no_file_can_be_chosen() {
        assert_eq!(workload(""), Ok(None));
        assert_eq!(workload("short-text"), Ok(Some(Workload::ShortText)));
        for word in ["replay", "--html", "short-text --html x"] {
            assert_eq!(workload(word), Err(word));
        }
    }

    #[test]
    fn the_command_says_the_same_as_the_instance_was_told() {
        let file = Words { config: vec!["--config".into(), "/etc/warden.toml".into()], ..Words::default() };
        let words = file.all("-x --html /etc/passwd", Some(Workload::ShortText), Path::new("/r/a.html"));
        assert_eq!(
            words,
            [
                "diagnose",
                "--config",
                "/etc/warden.toml",
                "--html",
                "/r/a.html",
                "--workload",
                "short-text",
                "--model=-x --html /etc/passwd"
            ]
        );
        let flags = Words { flags: vec!["-m".into(), "m.gguf".into()], ..Words::default() };
        assert_eq!(
            flags.all("m", None, Path::new("/r/a.html")),
            ["diagnose", "--html", "/r/a.html", "--", "-m", "m.gguf"]
        );
        let plan = Plan {
            config: crate::cli::ConfigArgs::default(),
            flags: crate::cli::serve::folders(&["/a b".into(), "/c".into()]).into_iter().collect(),
            server_flags: Vec::new(),
            any_name: false,
        };
        assert_eq!(
            Words::of(&plan).all("m", None, Path::new("/r/a.html")),
            ["diagnose", "--models-dir=/a b", "--models-dir=/c", "--html", "/r/a.html", "--model=m"]
        );
    }

    #[test]
    fn an_exit_code_is_a_sentence() {
        assert_eq!(outcome(Exit::Code(3), Some("x")), (true, "a leak was found".to_owned()));
        assert_eq!(outcome(Exit::Code(1), Some("no such file")).1, "it failed (exit code 1): no such file");
        assert!(!outcome(Exit::Signal(9), None).0);
    }
}
