//! `llama-warden keys new|check`: creates API keys and checks a file of keys.

use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use warden_config::resolve::keys::{KeyFile, key_section, new_key};

use crate::exit::CommandError;
use crate::out;

#[derive(Debug, Subcommand)]
pub(crate) enum KeysCommand {
    /// Prints a new key, once, with the section for the file of keys that contains its hash.
    New(KeyNewArgs),
    /// Checks a file of keys and lists the permissions of each. Prints no key.
    Check {
        /// File of keys.
        file: PathBuf,
    },
}

#[derive(Debug, Args)]
pub(crate) struct KeyNewArgs {
    /// Name of the key, for logs and metrics.
    name: String,
    /// Appends the section to this file, created if missing, and prints only the key.
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
    #[command(flatten)]
    limits: KeyLimitArgs,
}

/// Permissions and limits of a new key. Default: everything except opening the page.
#[derive(Debug, Default, Args)]
struct KeyLimitArgs {
    /// Permitted models, by name, alias or pattern (`embed-*`), separated by commas.
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    models: Vec<String>,
    /// Maximum request rate: 60/min, 1000/h.
    #[arg(long, value_name = "RATE")]
    rate: Option<String>,
    /// Maximum token rate, of prompts and answers: 200000/h.
    #[arg(long, value_name = "RATE")]
    tokens: Option<String>,
    /// Maximum number of concurrent requests.
    #[arg(long, value_name = "N")]
    concurrency: Option<u32>,
    /// Allows the key to open the page on the public listener.
    #[arg(long)]
    operator: bool,
}

impl KeyLimitArgs {
    fn lines(&self) -> String {
        let models = (!self.models.is_empty()).then(|| toml::Value::from(self.models.clone()));
        let rate = |text: &Option<String>| text.clone().map(toml::Value::from);
        let all = [
            ("models", models),
            ("rate", rate(&self.rate)),
            ("tokens", rate(&self.tokens)),
            ("concurrency", self.concurrency.map(toml::Value::from)),
            ("operator", self.operator.then(|| toml::Value::from(true))),
        ];
        let given = all.into_iter().filter_map(|(key, value)| Some(format!("{key} = {}\n", value?)));
        given.collect()
    }
}

pub(crate) fn run(command: KeysCommand) -> Result<(), CommandError> {
    match command {
        KeysCommand::New(args) => print_new_key(&args),
        KeysCommand::Check { file } => out::print_text(&keys_table(&KeyFile::load(&file)?)),
    }
}

fn print_new_key(args: &KeyNewArgs) -> Result<(), CommandError> {
    let key = new_key();
    let section = key_section(&args.name, &key) + &args.limits.lines();
    // Parse the section first, to neither print nor write an invalid key.
    KeyFile::parse(Path::new("keys new"), &section)?;
    let Some(file) = &args.file else {
        return out::print_text(&format!("{}\n\n{section}", key.as_str()));
    };
    append_section(file, &section, &args.name)?;
    out::print_line(&key)?;
    let shown = file.display();
    out::error_line(&format!(
        "{shown} counts where the configuration says `server.keys = \"{shown}\"`, after a reload; from then on every \
         request needs a key"
    ));
    Ok(())
}

fn append_section(file: &Path, section: &str, name: &str) -> Result<(), CommandError> {
    let failed = |error: std::io::Error| {
        CommandError::hinted(
            format!("cannot write the file of keys {}: {error}", file.display()),
            "name a file that you may write to",
        )
    };
    let exists = std::fs::metadata(file).is_ok_and(|facts| facts.len() > 0);
    if exists {
        let known = KeyFile::load(file)?;
        if known.keys.iter().any(|key| key.name == name) {
            return Err(CommandError::usage(
                format!("{} has a key `{name}` already", file.display()),
                "choose another name, or remove that one first",
            ));
        }
    }
    let mut out = OpenOptions::new().create(true).append(true).mode(0o600).open(file).map_err(failed)?;
    let gap = if exists { "\n" } else { "" };
    out.write_all(format!("{gap}{section}").as_bytes()).map_err(failed)
}

fn keys_table(file: &KeyFile) -> String {
    let text = |value: Option<String>, without: &str| value.unwrap_or_else(|| without.to_owned());
    let rows = file.keys.iter().map(|key| {
        vec![
            key.name.clone(),
            if key.in_clear { "clear text" } else { "hash" }.to_owned(),
            text(key.models.as_ref().map(|models| models.join(", ")), "all"),
            text(key.rate.map(|rate| rate.to_string()), "any"),
            text(key.tokens.map(|rate| rate.to_string()), "any"),
            text(key.concurrency.map(|most| most.to_string()), "any"),
            if key.operator { "operator" } else { "no" }.to_owned(),
        ]
    });
    out::table(["NAME", "KEPT AS", "MODELS", "RATE", "TOKENS", "AT A TIME", "PAGE"], rows)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_key_is_appended_to_a_private_file_once() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("keys.toml");
        for name in ["alice", "bob"] {
            append_section(&file, &key_section(name, &new_key()), name).unwrap();
        }
        assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
        let names: Vec<_> = KeyFile::load(&file).unwrap().keys.into_iter().map(|key| key.name).collect();
        assert_eq!(names, ["alice", "bob"]);
        let before = std::fs::read(&file).unwrap();
        let error = append_section(&file, &key_section("bob", &new_key()), "bob").unwrap_err();
        assert_eq!(error.code(), 2);
        assert_eq!(std::fs::read(&file).unwrap(), before);
    }

    #[test]
    fn what_a_new_key_may_do_is_written_with_it_and_what_is_no_rate_is_refused() {
        #[derive(clap::Parser)]
        struct KeysTestCli {
            #[command(flatten)]
            args: KeyNewArgs,
        }
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("keys.toml");
        let make = |name: &str, limits: &[&str]| {
            let words = ["new", name, "--file", file.to_str().unwrap()];
            let own: KeysTestCli = clap::Parser::try_parse_from(words.iter().chain(limits)).unwrap();
            print_new_key(&own.args)
        };
        make("alice", &["--models", "qwen,embed-*", "--rate", "60/min", "--concurrency", "4"]).unwrap();
        make("root", &["--tokens", "200000/h", "--operator"]).unwrap();
        let error = make("bob", &["--rate", "60 a minute"]).unwrap_err();
        assert!(error.lines()[0].contains("is not a rate"), "{:?}", error.lines());
        insta::assert_snapshot!(keys_table(&KeyFile::load(&file).unwrap()));
    }

    #[test]
    fn who_may_do_what_is_a_table_without_keys() {
        let text = key_section("bob", "an-example-key-that-is-long-enough-to-be-taken")
            + "\n[alice]\nkey = \"another-example-key-that-is-long-enough\"\n\
                    models = [\"org/*\", \"small\"]\nrate = \"60/min\"\ntokens = \"100000/d\"\nconcurrency = 2\noperator = true\n";
        let file = KeyFile::parse(Path::new("keys.toml"), &text).unwrap();
        insta::assert_snapshot!(text + "\n" + &keys_table(&file));
    }
}
