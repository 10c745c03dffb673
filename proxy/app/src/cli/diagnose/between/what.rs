//! Identity of a search: a hash of everything that changes its results. The file of results is named by it.

use std::path::PathBuf;

use sha2::{Digest as _, Sha256};
use warden_experiment::Workload;

use super::CommitSearch;
use crate::exit::CommandError;

/// Prefixes of the variables that llama.cpp and its libraries read.
const LLAMA_VARIABLE_PREFIXES: [&str; 7] = ["LLAMA_", "GGML_", "CUDA_", "HIP_", "ROCR_", "OMP_", "MALLOC_"];

impl CommitSearch<'_> {
    /// The name of the search's file of results. Contains only a hash of the command and its variables,
    /// which may include keys.
    pub(super) async fn file_name(
        &self,
        workloads: &[Workload],
        requests: u64,
    ) -> Result<String, CommandError> {
        let model = &self.configured.fleet.models[self.index];
        let command = &model.command;
        // Leave out files named by variables, and the log: a server writes to them, so each start would
        // begin another search.
        let named = input_file_words(&command.args).map(PathBuf::from).chain(self.args.replay.clone());
        let facts = |path: PathBuf| {
            let facts = std::fs::metadata(&path).ok().filter(std::fs::Metadata::is_file)?;
            Some((path, facts.len(), facts.modified().ok()))
        };
        let files: Vec<_> = named.filter_map(facts).collect();
        let is_own = |name: &str| {
            LLAMA_VARIABLE_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
                && !name.starts_with("LLAMA_WARDEN_")
        };
        let mut inherited: Vec<(String, String)> = self.machine.text_vars();
        inherited.retain(|(name, _)| is_own(name));
        // The machine decides what is built, and with which tools.
        let (oldest, newest) = (&self.line[0], &self.line[self.line.len() - 1]);
        let plan = self.builder.plan(&self.request(newest)).await?;
        let aim = self.args.aim();
        // The `[proof]` settings do not affect a search for growth.
        let proof = (!aim.is_growth()).then_some(&self.configured.settings.proof);
        let all = [
            format!("{} {} {} {}", env!("CARGO_PKG_VERSION"), self.shown, oldest.commit, newest.commit),
            format!("{workloads:?} {requests} {aim:?} {proof:?}"),
            format!("{:?} {:?}", plan.recipe.backend, plan.recipe.cmake),
            format!("{:?} {:?} {:?}", command.args, command.env, command.env_remove),
            format!("{:?} {:?}", self.configured.models[self.index].mitigations, model.run.socket),
            format!("{files:?} {inherited:?}"),
            format!("{:?} {:?}", self.configured.settings.diagnose, self.configured.fleet.growth),
        ];
        let short = |commit: &str| commit.chars().take(9).collect::<String>();
        let hash = hex::encode(&Sha256::digest(all.join("\n"))[..8]);
        Ok(format!("{}-{}-{hash}.jsonl", short(&oldest.commit), short(&newest.commit)))
    }
}

/// Returns the words of a server's command line that may name a file to read.
fn input_file_words(args: &[String]) -> impl Iterator<Item = &String> {
    let before = std::iter::once(None).chain(args.iter().map(Some));
    let read =
        args.iter().zip(before).filter(|(_, before)| before.is_none_or(|before| before != "--log-file"));
    read.map(|(word, _)| word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_server_writes_makes_no_other_search() {
        let args = ["-m", "model.gguf", "--log-file", "out.log", "-ngl", "9"].map(str::to_owned);
        assert_eq!(
            input_file_words(&args).collect::<Vec<_>>(),
            ["-m", "model.gguf", "--log-file", "-ngl", "9"]
        );
    }
}
