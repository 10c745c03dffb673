//! Lists the commits of a range, reads files of each, or writes one out: `commits REPOSITORY A B [EVERY] [FILE...]` and
//! `commits REPOSITORY REF FOLDER`.

use std::path::Path;

use tokio::time::Instant;
use warden_builder::git::Repository;
use warden_builder::patch::Tree;
use warden_builder::{Error, Source};

#[expect(clippy::print_stdout, reason = "it is a command")]
fn main() -> Result<(), Error> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let Some((repository, from, to)) =
        args.first().zip(args.get(1)).zip(args.get(2)).map(|((a, b), c)| (a, b, c))
    else {
        println!("usage: commits REPOSITORY A B [EVERY] [FILE...]");
        return Ok(());
    };
    let repository = Repository::open(Path::new(repository))?;
    let every = args.get(3).and_then(|text| text.parse().ok()).unwrap_or(1);
    let begun = Instant::now();
    let range = repository.range(from, to, every)?;
    println!("{} commits in {:.2} s", range.len(), begun.elapsed().as_secs_f64());
    for revision in range.iter().take(2).chain(range.iter().rev().take(2)) {
        println!("{} {} {}", revision.commit, revision.label, revision.date);
    }
    let begun = Instant::now();
    let (mut ids, mut bytes) = (std::collections::HashSet::new(), 0);
    for revision in &range {
        let tree = repository.tree(&revision.commit)?;
        for file in args.iter().skip(4) {
            if let Some(id) = tree.content_id(file)?
                && ids.insert(id)
            {
                bytes += tree.read(file)?.unwrap_or_default().len();
            }
        }
    }
    println!("{} distinct files, {bytes} bytes in {:.2} s", ids.len(), begun.elapsed().as_secs_f64());
    let commit = repository.resolve(to)?;
    let source = Source::Commit {
        repository: repository.path().to_owned(),
        shown: repository.shown().to_owned(),
        commit,
    };
    let found = source.examine(Path::new("/nonexistent"), &tokio_util::sync::CancellationToken::new())?;
    println!("{found}, {}", found.identity);
    Ok(())
}
