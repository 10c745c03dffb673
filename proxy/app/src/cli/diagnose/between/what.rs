//! What a search is: everything that changes what comes of it, so that it goes on only where it is the same.

use std::path::PathBuf;

use warden_policies::experiment::Workload;

use super::Between;
use super::kept::{What, hash};
use crate::exit::Failure;

impl Between<'_> {
    /// This one.
    pub(super) async fn what(&self, workloads: &[Workload], requests: u64) -> Result<What, Failure> {
        let model = &self.configured.fleet.models[self.index];
        let command = &model.command;
        // Not those of variables, nor its log: a server writes there, and each of its starts would begin another search.
        let named = read(&command.args).map(PathBuf::from).chain(self.args.replay.clone());
        let facts = |path: PathBuf| {
            let facts = std::fs::metadata(&path).ok().filter(std::fs::Metadata::is_file)?;
            Some(format!("{}: {} bytes of {:?}", path.display(), facts.len(), facts.modified().ok()))
        };
        let files: Vec<String> = named.filter_map(facts).collect();
        let own = ["LLAMA_", "GGML_", "CUDA_", "HIP_", "ROCR_", "OMP_", "MALLOC_"];
        let inherited: Vec<(String, String)> = self.machine.text_vars();
        let inherited: Vec<_> = inherited
            .into_iter()
            .filter(|(name, _)| {
                own.iter().any(|prefix| name.starts_with(prefix)) && !name.starts_with("LLAMA_WARDEN_")
            })
            .collect();
        // What it is built for and with follows from the machine.
        let plan = self.builder.plan(&self.request(&self.line[self.line.len() - 1])).await?;
        let aim = self.args.aim();
        // Of the numbers of a proof only those depend on them that it judges.
        let proof = if aim.is_growth() { String::new() } else { format!("{:?}", self.configured.proof) };
        let rest = [
            format!("{:?} {:?}", plan.recipe.backend, plan.recipe.cmake),
            format!("{:?} {:?} {:?}", command.args, command.env, command.env_remove),
            format!("{:?} {:?}", self.configured.mitigations[self.index], model.run.socket),
            format!("{files:?} {inherited:?}"),
            format!("{:?} {:?}", self.configured.diagnose, self.configured.fleet.growth),
            proof,
        ];
        Ok(What {
            warden: env!("CARGO_PKG_VERSION").to_owned(),
            repository: self.shown.clone(),
            older: self.line[0].commit.clone(),
            newer: self.line[self.line.len() - 1].commit.clone(),
            workloads: workloads.iter().map(ToString::to_string).collect(),
            requests,
            aim,
            rest: hash(&rest.concat()),
        })
    }
}

/// Those words of a server's command line that may name a file which it reads.
fn read(args: &[String]) -> impl Iterator<Item = &String> {
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
        assert_eq!(read(&args).collect::<Vec<_>>(), ["-m", "model.gguf", "--log-file", "-ngl", "9"]);
    }
}
