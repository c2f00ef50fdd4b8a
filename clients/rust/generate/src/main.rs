//! Writes the generated code of the client from a descriptor set of the schema.
//!
//! Usage: `generate DESCRIPTOR_SET FOLDER`, as `clients/rust/generate.sh` does.

use std::error::Error;
use std::path::PathBuf;

use prost::Message;
use prost_types::FileDescriptorSet;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    let [descriptor_set, folder] = arguments.as_slice() else {
        return Err("usage: generate DESCRIPTOR_SET FOLDER".into());
    };
    let schema = FileDescriptorSet::decode(std::fs::read(descriptor_set)?.as_slice())?;
    tonic_prost_build::configure().build_server(false).out_dir(folder).compile_fds(schema)?;
    Ok(())
}
