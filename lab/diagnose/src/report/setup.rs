//! The setup of an experiment, and the part of the script that starts the same server: same arguments and
//! variables, without secrets. Shell variables name files that lie elsewhere on another machine.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use warden_policies::secrets::{self, is_hidden};
use warden_supervisor::ServerCommand;

use crate::shell::{quote_assignment, quote_word};

/// Setup of the experiment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExperimentSetup {
    /// Version of llama-warden.
    pub warden: String,
    /// Start time, RFC 3339.
    pub began: String,
    /// Name in the configuration, or on the command line.
    pub model: String,
    /// Path of llama-server.
    pub binary: String,
    /// llama-server's answer to `--version`, or the id of its build.
    pub server: String,
    /// llama-server's arguments.
    pub args: Vec<String>,
    /// Variables set for llama-server, in addition to our environment.
    pub env: Vec<(String, String)>,
    /// Variables inherited from our environment that concern llama.cpp, a GPU or the C library.
    #[serde(default)]
    pub inherited: Vec<(String, String)>,
    /// Tool that ran the server, as typed; measured memory includes the tool's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub under: Option<String>,
    /// Machine and software, a line each.
    #[serde(default)]
    pub system: Vec<(String, String)>,
}

const INHERITED_PREFIXES: [&str; 16] = [
    "LLAMA_",
    "GGML_",
    "CUDA_",
    "NVIDIA_TF32_",
    "HIP_",
    "ROCR_",
    "HSA_",
    "VK_",
    "SYCL_",
    "ONEAPI_",
    "MTMD_",
    "MALLOC_",
    "OMP_",
    "GLIBC_TUNABLES",
    "LD_PRELOAD",
    "LD_LIBRARY_PATH",
];
/// A plain llama-server ignores variables with this prefix.
const OWN_PREFIX: &str = "LLAMA_WARDEN_";

impl ExperimentSetup {
    /// Adds a command, without its secrets.
    #[must_use]
    pub fn with_command(mut self, command: &ServerCommand) -> Self {
        // A model without a name is named by its address.
        self.model = secrets::redact_addresses(&self.model);
        self.binary = command.binary.display().to_string();
        if !command.wrapper.is_empty() {
            let words = secrets::redact_tool(&command.wrapper);
            self.under = Some(words.iter().map(|word| quote_word(word)).collect::<Vec<_>>().join(" "));
        }
        self.args = secrets::redact_arguments(&command.args);
        self.env = command.env.iter().map(|(name, value)| secrets::redact_variable(name, value)).collect();
        self
    }

    /// Adds those of our variables that the command inherits and that concern it, without secrets.
    #[must_use]
    pub fn with_inherited(mut self, variables: &[(String, String)], command: &ServerCommand) -> Self {
        let counts = |name: &str| {
            let other = command.env_remove.iter().chain(command.env.iter().map(|(name, _)| name));
            INHERITED_PREFIXES.iter().any(|start| name.starts_with(start))
                && !name.starts_with(OWN_PREFIX)
                && !other.into_iter().any(|known| known == name)
        };
        let own = variables.iter().filter(|(name, _)| counts(name));
        self.inherited = own.map(|(name, value)| secrets::redact_variable(name, value)).collect();
        self.inherited.sort();
        self
    }

    pub(crate) fn command_line(&self) -> String {
        let env = self.inherited.iter().chain(&self.env).map(|(name, value)| quote_assignment(name, value));
        let words = std::iter::once(&self.binary).chain(&self.args).map(|word| quote_word(word));
        env.chain(self.under.clone()).chain(words).collect::<Vec<_>>().join(" ")
    }
}

struct ScriptFile {
    /// Shell variable with the path on the other machine.
    name: &'static str,
    /// llama-server's flags for the file; the script adds the first if the command has none.
    flags: [&'static str; 2],
    /// llama-server's environment variable for the file.
    variable: &'static str,
    /// llama-server's flags and environment variable for the address that the file is loaded from.
    address: ([&'static str; 2], &'static str),
}

const SCRIPT_FILES: [ScriptFile; 2] = [
    ScriptFile {
        name: "MODEL",
        flags: ["-m", "--model"],
        variable: "LLAMA_ARG_MODEL",
        address: (["-mu", "--model-url"], "LLAMA_ARG_MODEL_URL"),
    },
    ScriptFile {
        name: "MMPROJ",
        flags: ["-mm", "--mmproj"],
        variable: "LLAMA_ARG_MMPROJ",
        address: (["-mmu", "--mmproj-url"], "LLAMA_ARG_MMPROJ_URL"),
    },
];
/// Flags with secrets, or with files of secrets. The script's server needs no key.
const SECRET_FLAGS: [&str; 2] = ["--api-key", "--api-key-file"];

enum FileOption {
    Flag(PathBuf),
    Variable(PathBuf),
    Secret,
}

impl ScriptFile {
    /// Returns the option that llama-server uses: a flag takes precedence over a variable.
    fn find_option(&self, about: &ExperimentSetup, directory: &Path) -> Option<FileOption> {
        let flag = |flags: &[&str]| {
            let at = about.args.iter().rposition(|word| flags.contains(&word.as_str()))?;
            about.args.get(at + 1)
        };
        let variable = |name: &str| {
            let mut all = about.env.iter().chain(&about.inherited);
            all.find_map(|(known, value)| (known == name).then_some(value)).filter(|value| !value.is_empty())
        };
        if let Some(file) = flag(&self.flags) {
            return Some(FileOption::Flag(directory.join(file)));
        }
        if let Some(file) = variable(self.variable) {
            return Some(FileOption::Variable(directory.join(file)));
        }
        let address = flag(&self.address.0).or_else(|| variable(self.address.1))?;
        is_hidden(address).then_some(FileOption::Secret)
    }

    fn variable_reference(&self) -> String {
        format!("\"${}\"", self.name.to_lowercase())
    }
}

/// Secrets are left out. Paths of files become absolute, or shell variables.
pub(super) fn arguments(about: &ExperimentSetup, directory: &Path) -> String {
    let mut words: Vec<String> = Vec::new();
    let mut before = "";
    for word in &about.args {
        if is_hidden(word) || SECRET_FLAGS.contains(&before) {
            words.pop();
        } else if let Some(file) = SCRIPT_FILES.iter().find(|file| file.flags.contains(&before)) {
            words.push(file.variable_reference());
        } else {
            words.push(quote_word(&absolute_path(word, before, directory)));
        }
        before = word;
    }
    for file in SCRIPT_FILES
        .iter()
        .filter(|file| matches!(file.find_option(about, directory), Some(FileOption::Secret)))
    {
        words.extend([file.flags[0].to_owned(), file.variable_reference()]);
    }
    words.join(" ")
}

fn absolute_path(word: &str, before: &str, directory: &Path) -> String {
    let path = directory.join(word);
    let is_file = before.starts_with('-') && !word.starts_with('-') && path.is_file();
    if is_file { path.to_string_lossy().into_owned() } else { word.to_owned() }
}

/// Returns the shell variables for files that lie elsewhere on another machine.
pub(super) fn file_variables(about: &ExperimentSetup, directory: &Path) -> String {
    let line = |file: &ScriptFile| {
        let (name, theirs) = (file.name.to_lowercase(), file.name);
        Some(match file.find_option(about, directory)? {
            FileOption::Flag(path) | FileOption::Variable(path) => {
                let path = quote_word(&path.to_string_lossy());
                format!("{name}={path}\n[ -z \"${{{theirs}:-}}\" ] || {name}=${theirs}\n")
            }
            FileOption::Secret => {
                format!("{name}=${{{theirs}:?name the file: where it came from looks like a secret}}\n")
            }
        })
    };
    SCRIPT_FILES.iter().filter_map(line).collect()
}

/// Returns the variables that the server got from its command or our environment, except secrets.
pub(super) fn export_lines(about: &ExperimentSetup, directory: &Path) -> String {
    let given = |name: &str| {
        let is_it = |file: &&ScriptFile| {
            file.variable == name
                && matches!(file.find_option(about, directory), Some(FileOption::Variable(_)))
        };
        SCRIPT_FILES.iter().find(is_it).map(ScriptFile::variable_reference)
    };
    let all = || about.inherited.iter().chain(&about.env).filter(|(name, _)| is_variable_name(name));
    let (hidden, told): (Vec<_>, Vec<_>) = all().partition(|(_, value)| is_hidden(value));
    let line = |(name, value): &&(String, String)| {
        format!("export {name}={}\n", given(name).unwrap_or_else(|| quote_word(value)))
    };
    let mut lines: Vec<String> = told.iter().map(line).collect();
    lines.extend(hidden.iter().map(|(name, _)| format!("# {name} was set, too: it looks like a secret.\n")));
    lines.concat()
}

pub(super) fn is_variable_name(name: &str) -> bool {
    let word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_') && name.chars().all(word)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HERE: &str = "/here";

    fn about(args: &[&str], env: &[(&str, &str)]) -> ExperimentSetup {
        let args = args.iter().map(|&word| word.to_owned()).collect();
        let env = env.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect();
        let command = ServerCommand { args, env, ..ServerCommand::from_binary("x".into()) };
        ExperimentSetup::default().with_command(&command)
    }

    #[test]
    fn secrets_are_left_out_with_their_flags_and_words_are_quoted() {
        let about = about(&["-m", "/a b/m.gguf", "--api-key", "hush", "-c", "4096"], &[]);
        let here = Path::new(HERE);
        assert_eq!(arguments(&about, here), "-m \"$model\" -c 4096");
        let files = file_variables(&about, here);
        assert!(files.starts_with("model='/a b/m.gguf'\n") && files.contains("model=$MODEL"), "{files}");
        assert!(
            is_variable_name("GGML_X1")
                && !is_variable_name("1X")
                && !is_variable_name("A B")
                && !is_variable_name("")
        );
    }

    #[test]
    fn files_that_variables_name_can_be_others_too_unless_a_flag_counts_more() {
        let here = Path::new(HERE);
        let env = [("LLAMA_ARG_MODEL", "m.gguf"), ("LLAMA_ARG_MMPROJ", "/p.gguf")];
        let plain = about(&["-c", "4096"], &env);
        assert_eq!(
            file_variables(&plain, here),
            "model=/here/m.gguf\n[ -z \"${MODEL:-}\" ] || model=$MODEL\nmmproj=/p.gguf\n[ -z \"${MMPROJ:-}\" ] || \
             mmproj=$MMPROJ\n"
        );
        assert_eq!(
            export_lines(&plain, here),
            "export LLAMA_ARG_MODEL=\"$model\"\nexport LLAMA_ARG_MMPROJ=\"$mmproj\"\n"
        );
        let both = about(&["-m", "/n.gguf"], &env);
        assert!(file_variables(&both, here).starts_with("model=/n.gguf\n"));
        assert!(export_lines(&both, here).starts_with("export LLAMA_ARG_MODEL=m.gguf\n"));
    }

    #[test]
    fn a_model_of_an_address_with_secrets_has_to_be_named() {
        let here = Path::new(HERE);
        let secret = "https://u:pw@host/m.gguf?sig=1";
        for about in [about(&["-mu", secret], &[]), about(&[], &[("LLAMA_ARG_MODEL_URL", secret)])] {
            assert_eq!(arguments(&about, here), "-m \"$model\"");
            assert!(file_variables(&about, here).starts_with("model=${MODEL:?name the file"));
            let all = format!("{about:?}{}{}", export_lines(&about, here), about.command_line());
            assert!(!all.contains("pw") && !all.contains("sig"), "{all}");
        }
        let open = about(&["-mu", "https://host/m.gguf"], &[]);
        assert_eq!(
            (arguments(&open, here).as_str(), file_variables(&open, here).as_str()),
            ("-mu https://host/m.gguf", "")
        );
    }

    #[test]
    fn what_was_inherited_is_given_and_secrets_are_only_named() {
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        let own = ServerCommand {
            env: vec![pair("MALLOC_ARENA_MAX", "2"), pair("HF_TOKEN", "hush")],
            env_remove: vec!["CUDA_GONE".to_owned()],
            ..ServerCommand::from_binary("x".into())
        };
        let all = [
            pair("LLAMA_ARG_N_PARALLEL", "3"),
            pair("GGML_CUDA_FORCE", "a b"),
            pair("LLAMA_API_KEY", "hush"),
            pair("CUDA_GONE", "1"),
            pair("MALLOC_ARENA_MAX", "9"),
            pair("LLAMA_WARDEN_X", "1"),
            pair("HOME", "/root"),
        ];
        let about = ExperimentSetup::default().with_command(&own).with_inherited(&all, &own);
        assert_eq!(
            export_lines(&about, Path::new(HERE)),
            "export GGML_CUDA_FORCE='a b'\nexport LLAMA_ARG_N_PARALLEL=3\nexport MALLOC_ARENA_MAX=2\n# LLAMA_API_KEY was \
             set, too: it looks like a secret.\n# HF_TOKEN was set, too: it looks like a secret.\n"
        );
        assert!(about.command_line().starts_with("GGML_CUDA_FORCE='a b' "), "{}", about.command_line());
    }
}
